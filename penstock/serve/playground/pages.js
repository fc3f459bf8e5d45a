// The pages of the playground: the page of the model's task, the comparison of two settings, and the metrics.
// The fragment of the URL names the page, so that links to a page and the Back button work.

import { byId } from "./dom.js";

const PAGE_NAMES = ["chat", "compare", "metrics"];
const TITLES = { chat: "Chat", similarity: "Similarity", speech: "Speech", scores: "Model" };

/** Kind of page -> ids of its elements. Elements of other kinds are hidden. */
const ELEMENT_IDS = {
  chat: ["log", "chat-tools", "composer", "settings", "show-settings", "panel"],
  compare: ["compare", "composer", "settings", "show-settings", "panel"],
  metrics: ["metrics"],
  similarity: ["similarity", "panel"],
  speech: ["speech", "panel"],
  scores: ["panel"],
};

/** Kind of page -> id of the target of the skip link. For all other kinds the target is #draft. */
const SKIP_TARGETS = { similarity: "similarity-texts", speech: "speech-text", metrics: "metrics", scores: "model" };

export class Pages {
  /** `onpage(name)` is called when the page changes. */
  constructor({ onpage }) {
    this._onpage = onpage;
    this.current = "chat"; // chat (the page of the model's task), compare or metrics
    this.kind = "chat"; // the page of the model's task: chat, similarity, speech, scores
    window.addEventListener("hashchange", () => this._openFragment());
    this._openFragment();
    this._show();
  }

  /** Chooses the page of a model's task. */
  setModel({ task, outputs }) {
    this.kind = "chat";
    if (task === "audio-generation") this.kind = "speech";
    if (task === "embeddings-generation") this.kind = outputs.includes("dense") ? "similarity" : "scores";
    if (this.current === "compare" && this.kind !== "chat") this._open("chat");
    else this._show();
  }

  _openFragment() {
    const name = location.hash.slice(1);
    if (name === "compare" && this.kind !== "chat") return;
    if (PAGE_NAMES.includes(name) && name !== this.current) this._open(name);
  }

  _open(name) {
    this.current = name;
    this._show();
    this._onpage(name);
  }

  _show() {
    const kind = this.current === "chat" ? this.kind : this.current;
    for (const id of new Set(Object.values(ELEMENT_IDS).flat())) byId(id).hidden = !ELEMENT_IDS[kind].includes(id);
    for (const link of document.querySelectorAll("a[data-page]")) {
      const isCurrent = link.dataset.page === this.current;
      if (isCurrent) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
      if (link.dataset.page === "chat") link.textContent = TITLES[this.kind];
      if (link.dataset.page === "compare") link.hidden = this.kind !== "chat";
    }
    byId("skip").setAttribute("href", `#${SKIP_TARGETS[kind] ?? "draft"}`);
    document.body.dataset.page = kind;
    document.title = kind === "chat" ? "Penstock" : `Penstock: ${kind}`;
  }
}
