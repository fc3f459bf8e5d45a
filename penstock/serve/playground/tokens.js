// Log probabilities: one span per token group, darker for less probable tokens. Hover or focus shows the alternatives.

import { byId, make } from "./dom.js";

const FULL_SHADE = Math.log(100); // -log(1 %): tokens at or below 1 % have the darkest shade

/** Groups of entries of `logprobs.content`. Tokens that encode parts of one character are in one group. */
export class TokenGroups {
  constructor() {
    this.groups = []; // {text, entries}
    this._decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this._pending = [];
  }

  push(entries) {
    for (const entry of entries) {
      this._pending.push(entry);
      const text = entry.bytes
        ? this._decoder.decode(new Uint8Array(entry.bytes), { stream: true })
        : entry.token;
      if (text || !entry.bytes?.length) this._close(text);
    }
  }

  /** Ends the last group. The bytes of an incomplete character become U+FFFD. */
  end() {
    const text = this._decoder.decode();
    if (this._pending.length) this._close(text);
    else if (text) this.groups.push({ text, entries: [] });
  }

  _close(text) {
    this.groups.push({ text, entries: this._pending });
    this._pending = [];
  }
}

/** An element that shows token groups. `sync` adds the groups that are not shown yet. */
export class ShadedText {
  constructor(tokens) {
    this._tokens = tokens;
    this._spans = [];
    this._groupOf = new WeakMap();
    this.element = make("div", {
      class: "text tokens",
      role: "group",
      "aria-label": "Tokens, shaded by probability; arrow keys move between tokens",
      onfocusin: (event) => this._showFor(event.target),
      onfocusout: hideAlternatives,
      onmouseover: (event) => this._showFor(event.target),
      onmouseout: hideAlternatives,
      onkeydown: (event) => this._moveFocus(event),
    });
  }

  sync() {
    const { groups } = this._tokens;
    for (const group of groups.slice(this._spans.length)) {
      const span = make("span", { class: "token", textContent: group.text });
      span.tabIndex = this._spans.length ? -1 : 0;
      const surprisal = Math.max(0, ...group.entries.map((entry) => -entry.logprob));
      span.style.setProperty("--shade", Math.min(1, surprisal / FULL_SHADE).toFixed(3));
      if (group.text.startsWith("\n")) span.classList.add("newline");
      if (group.text === "") span.classList.add("nothing");
      this._groupOf.set(span, group);
      this._spans.push(span);
      this.element.append(span);
    }
  }

  _showFor(span) {
    const group = this._groupOf.get(span);
    if (group?.entries.length) showAlternatives(span, group.entries);
  }

  _moveFocus(event) {
    const index = this._spans.indexOf(document.activeElement);
    const target = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: this._spans.length - 1 }[event.key];
    if (index < 0 || target === undefined) return;
    event.preventDefault();
    const span = this._spans[Math.max(0, Math.min(target, this._spans.length - 1))];
    this._spans[index].tabIndex = -1;
    span.tabIndex = 0;
    span.focus();
  }
}

/** Returns a log probability as a percentage. */
export function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value >= 99.95) return "100 %";
  return value >= 0.1 ? `${value.toFixed(1)} %` : value >= 0.001 ? `${value.toFixed(3)} %` : "< 0.001 %";
}

/** Returns a token's text with symbols for white space; its bytes if they are known and the text contains U+FFFD. */
export function visible({ token, bytes }) {
  if (token.includes("\uFFFD") && bytes) {
    return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  }
  return token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍").replaceAll(" ", "␣") || "(empty)";
}

function showAlternatives(span, entries) {
  const box = byId("alternatives");
  box.replaceChildren(...entries.map(tableOf));
  box.hidden = false;
  span.setAttribute("aria-describedby", "alternatives");
  const rectangle = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { width, height } = box.getBoundingClientRect();
  const left = Math.max(8, Math.min(rectangle.left, document.documentElement.clientWidth - width - 8));
  const below = rectangle.bottom + 6;
  const top = below + height > window.innerHeight ? Math.max(8, rectangle.top - height - 6) : below;
  box.style.left = `${left}px`;
  box.style.top = `${top}px`;
}

export function hideAlternatives(event) {
  byId("alternatives").hidden = true;
  event?.target.removeAttribute?.("aria-describedby");
}

/** Returns a table of the top tokens with the chosen token marked. The chosen token is added if it is missing. */
function tableOf(entry) {
  const topTokens = entry.top_logprobs;
  const isChosen = (candidate) => candidate.token === entry.token && String(candidate.bytes) === String(entry.bytes);
  const rows = topTokens.some(isChosen) ? topTokens : [...topTokens, entry];
  return make(
    "table",
    {},
    make("caption", { class: "sr", textContent: `${visible(entry)}, ${percent(entry.logprob)}` }),
    make("tbody", {}, ...rows.map((candidate) => rowOf(candidate, isChosen(candidate)))),
  );
}

function rowOf(candidate, isChosen) {
  const bar = make("span", { class: "probability" });
  bar.style.setProperty("--part", Math.exp(candidate.logprob).toFixed(4));
  return make(
    "tr",
    isChosen ? { class: "chosen" } : {},
    make("th", {}, make("code", { textContent: visible(candidate) }), isChosen ? make("span", { class: "sr", textContent: " (chosen)" }) : null),
    make("td", { class: "number", textContent: percent(candidate.logprob) }),
    make("td", { "aria-hidden": "true" }, bar),
  );
}
