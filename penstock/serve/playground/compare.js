// The page that sends one prompt with two settings and shows both answers side by side.

import { Message, streamInto } from "./answer.js";
import { byId, make } from "./dom.js";
import { MessageView } from "./messages.js";
import { WrongSetting } from "./settings.js";

/** The number fields of a side: request field -> label and attributes of the input element. */
const FIELDS = {
  temperature: { label: "Temperature", min: 0, max: 2, step: "any" },
  top_p: { label: "Top p", min: 0, max: 1, step: "any" },
  max_completion_tokens: { label: "Max tokens", min: 1, step: 1 },
  seed: { label: "Seed", min: -Number.MAX_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER, step: 1 },
};

/** Returns the index of the first character in which two texts differ; -1 if they are equal. */
export function firstDifference(a, b) {
  const [charactersA, charactersB] = [[...a], [...b]];
  const index = charactersA.findIndex((character, i) => character !== charactersB[i]);
  if (index >= 0) return index;
  return charactersA.length === charactersB.length ? -1 : charactersA.length;
}

/** One side of the page: controls for one of the two settings, and the answer. */
class Side {
  constructor(name, settings) {
    this.name = name;
    this._settings = settings;
    this._view = null;
    this._model = make("select", {});
    this._system = make("textarea", { rows: 2, placeholder: "as in the general settings" });
    this._numberFields = Object.entries(FIELDS).map(([field, { label, ...limits }]) => {
      const input = make("input", { type: "number", placeholder: "as in the general settings", ...limits });
      return { field, label, input };
    });
    this._answer = make("div", { class: "side-answer" });
    const labels = this._numberFields.map(({ label, input }) => make("label", {}, label, input));
    const form = make(
      "form",
      { class: "side-settings", "aria-label": `Settings of ${name}`, onsubmit: (event) => event.preventDefault() },
      make("label", { class: "wide" }, "Model", this._model),
      make("label", { class: "wide" }, "System prompt", this._system),
      make("div", { class: "grid" }, ...labels),
    );
    form.noValidate = true;
    const title = make("h2", { textContent: name });
    this.element = make("section", { class: "side", "aria-label": `Side ${name}` }, title, form, this._answer);
  }

  get message() {
    return this._view?.message ?? null;
  }

  setModels(names) {
    const selectedModel = this._model.value;
    const sameModel = new Option("as in the header", "");
    this._model.replaceChildren(sameModel, ...names.map((name) => new Option(name, name)));
    if (names.includes(selectedModel)) this._model.value = selectedModel;
  }

  /**
   * Returns the request. Empty controls take the values of the general settings.
   * Throws `WrongSetting` if a number is invalid.
   */
  request(messages) {
    const body = this._settings.request(messages);
    if (this._model.value) body.model = this._model.value;
    const system = this._system.value;
    if (system.trim()) body.messages = [{ role: "system", content: system }, ...messages];
    for (const { field, input } of this._numberFields) {
      if (!input.checkValidity()) {
        input.reportValidity();
        throw new WrongSetting(input.validationMessage);
      }
      if (input.value !== "") body[field] = input.valueAsNumber;
    }
    return body;
  }

  /** Requests an answer, shows the text as it arrives, and returns the message. */
  async answer(body, signal) {
    const message = new Message("assistant", "", { isLive: true });
    const view = new MessageView(message, { shades: this._settings.shades, name: `Answer ${this.name}` });
    this._view = view;
    this._answer.replaceChildren(view.element);
    let isSyncScheduled = false;
    await streamInto(message, body, signal, () => {
      if (isSyncScheduled) return;
      isSyncScheduled = true;
      requestAnimationFrame(() => {
        isSyncScheduled = false;
        if (message.isLive) view.sync();
      });
    });
    view.shade(this._settings.shades);
    return message;
  }

  shade(shades) {
    if (this._view && !this.message.isLive) this._view.shade(shades);
  }
}

export class CompareView {
  /**
   * `settings` are the general settings. `onerror(error)` is called for a failed answer, `onchange()` when the answers
   * begin or have ended, and `onannounce(text)` with text for screen readers.
   */
  constructor({ settings, onerror, onchange, onannounce }) {
    Object.assign(this, { _onerror: onerror, _onchange: onchange, _onannounce: onannounce });
    this._controller = null; // the AbortController of both requests
    this._lastPrompt = null;
    this._sides = ["A", "B"].map((name) => new Side(name, settings));
    byId("compare-sides").append(...this._sides.map((side) => side.element));
  }

  get isRunning() {
    return this._controller !== null;
  }

  setModels(names) {
    this._sides.forEach((side) => side.setModels(names));
  }

  shade(shades) {
    this._sides.forEach((side) => side.shade(shades));
  }

  /** Sends a prompt with both settings. Without text and images, sends the last prompt again. Returns false if no prompt was sent. */
  send(text, images) {
    const prompt = text.trim() || images.length ? new Message("user", text, { images: [...images] }) : this._lastPrompt;
    if (!prompt || this.isRunning) return false;
    let bodies;
    try {
      bodies = this._sides.map((side) => side.request([prompt.toRequest()]));
    } catch (error) {
      if (!(error instanceof WrongSetting)) throw error;
      return false;
    }
    this._lastPrompt = prompt;
    this._run(prompt, bodies);
    return true;
  }

  /** Stops both answers. */
  stop() {
    this._controller?.abort();
  }

  async _run(prompt, bodies) {
    this._controller = new AbortController();
    byId("compare-empty").hidden = true;
    byId("compare-note").textContent = "";
    byId("compare-prompt").replaceChildren(new MessageView(prompt, { shades: false, name: "Prompt" }).element);
    this._updateBusy();
    this._onannounce("Both answers are being generated.");
    await Promise.all(this._sides.map((side, i) => this._answer(side, bodies[i])));
    this._controller = null;
    this._updateBusy();
    this._showNote();
  }

  async _answer(side, body) {
    const { error, numbers } = await side.answer(body, this._controller.signal);
    if (error) this._onerror(error);
    const end = error ? `failed: ${error.message}` : `has ended, ${numbers?.completion ?? 0} tokens.`;
    this._onannounce(`Answer ${side.name} ${end}`);
  }

  _updateBusy() {
    byId("compare-sides").setAttribute("aria-busy", String(this.isRunning));
    this._onchange();
  }

  /** Shows whether the answers are equal, unless one of them failed. */
  _showNote() {
    const [a, b] = this._sides.map((side) => side.message);
    if (a.error || b.error) return;
    const index = firstDifference(a.text, b.text);
    byId("compare-note").textContent =
      index < 0 ? "Both answers have the same text." : `The answers differ from character ${index + 1} on.`;
  }
}
