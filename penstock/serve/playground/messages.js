// The conversation on the page: one article per message.

import { button, copyText, fitHeight, make } from "./dom.js";
import { thumbnails } from "./images.js";
import { MarkdownText } from "./markdown.js";
import { ShadedText } from "./tokens.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool" };

const FINISH_TEXTS = {
  stop: "complete",
  length: "token limit reached",
  tool_calls: "tool calls",
  stopped: "stopped by you",
  error: "stopped by an error",
};

/** An element for text that grows. If new text continues the old text, it is appended, so that a selection remains. */
class GrowingText {
  constructor(properties) {
    this._text = document.createTextNode("");
    this.element = make("div", properties, this._text);
  }

  show(text) {
    if (text.startsWith(this._text.data)) this._text.appendData(text.slice(this._text.data.length));
    else this._text.data = text;
    this.element.hidden = !text;
  }
}

/**
 * The article of a message.
 *
 * `actions` has the functions of the buttons: edit(message, text, andAnswer), remove(message), branch(message),
 * regenerate(message), retry(message), sendResults(message, results). Its function updateButtons() is called when
 * editing is cancelled. If `actions` is null, the only button is Copy.
 */
export class MessageView {
  constructor(message, { actions = null, shades, name = NAMES[message.role] }) {
    this.message = message;
    this._actions = actions;
    this._shades = shades;
    this.element = make("article", { class: `message ${message.role}`, "aria-label": name });
    this._name = name;
    this._build();
  }

  /** Switches the shading of tokens on or off. */
  shade(shades) {
    this._shades = shades;
    this._build();
  }

  /** Updates the article from the message. */
  sync() {
    const { message } = this;
    const isShaded = this._shades && message.tokens.groups.length > 0;
    this.element.classList.toggle("live", message.isLive);
    this._waitingDots.hidden = !message.isLive || !message.isEmpty || isShaded;
    this._reasoningText.show(message.reasoning);
    this._reasoningDetails.hidden = isShaded || !message.reasoning;
    this._reasoningTitle.textContent = message.isLive && !message.text ? "Reasoning …" : "Reasoning";
    this._answerText.show(message.text);
    this._answerText.element.hidden ||= isShaded;
    this._tokens.element.hidden = !isShaded;
    if (isShaded) this._tokens.sync();
    this._syncCalls();
    this._numbers.replaceChildren(...numbersOf(message.numbers));
  }

  /** Disables the buttons if `isBusy`. Otherwise the last message shows `Try again` and the fields for tool results. */
  updateControls({ isLast, isBusy }) {
    for (const element of this._buttonBar.querySelectorAll("button")) element.disabled = isBusy;
    if (this._errorBox.firstChild) this._retryButton.hidden = !isLast || isBusy;
    this._showResults(isLast && !isBusy && !this.message.isLive);
  }

  _build() {
    const { message } = this;
    this._waitingDots = make("p", { class: "waiting", "aria-hidden": "true" }, make("i"), make("i"), make("i"));
    this._reasoningText = new GrowingText({ class: "text" });
    this._reasoningTitle = make("summary", { textContent: "Reasoning" });
    this._reasoningDetails = make("details", { class: "reasoning" }, this._reasoningTitle, this._reasoningText.element);
    this._images = make("div", { class: "images", hidden: !message.images.length }, ...thumbnails(message.images));
    const isPlain = message.role !== "assistant";
    this._answerText = isPlain ? new GrowingText({ class: "text" }) : new MarkdownText({ class: "text markdown" });
    this._tokens = new ShadedText(message.tokens);
    this._calls = make("div", { class: "calls" });
    this._callTexts = [];
    this._resultsForm = make("form", { class: "results", hidden: true });
    this._errorBox = make("div", { class: "error", role: "alert" });
    this._retryButton = button("Try again", () => this._actions.retry(message), { class: "quiet" });
    this._numbers = make("p", { class: "numbers" });
    this._buttonBar = make("div", { class: "acts" }, ...this._buttons());
    const name = message.role === "tool" ? `Tool · ${message.callId}` : this._name;
    this._body = make("div", { class: "body" });
    this._body.append(
      this._waitingDots,
      this._reasoningDetails,
      this._images,
      this._answerText.element,
      this._tokens.element,
      this._calls,
      this._resultsForm,
      this._errorBox,
    );
    const head = make("header", {}, make("span", { class: "role", textContent: name }), this._buttonBar);
    this.element.replaceChildren(head, this._body, this._numbers);
    this.sync();
    this._showError();
  }

  /** Shows the error of the message, if it has one. */
  _showError() {
    const { error } = this.message;
    this._errorBox.replaceChildren();
    if (!error) return;
    const facts = [
      error.status ? `status ${error.status}` : null,
      error.code,
      error.param && `field ${error.param}`,
      error.retryAfter && `try again in ${error.retryAfter} s`,
      error.requestId && `request ${error.requestId}`,
    ].filter(Boolean);
    this._errorBox.append(make("p", { textContent: error.message }));
    if (facts.length) this._errorBox.append(make("p", { class: "facts", textContent: facts.join(" · ") }));
    if (this._actions) this._errorBox.append(this._retryButton);
  }

  _buttons() {
    const { message, _actions: actions } = this;
    const copy = button("Copy", async () => {
      copy.textContent = (await copyText(message.text)) ? "Copied" : "Copy failed";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    if (!actions) return [copy];
    const regenerate = button("Regenerate", () => actions.regenerate(message));
    return [
      copy,
      button("Edit", () => this._edit()),
      button("Branch", () => actions.branch(message), { title: "Continue from here in a new conversation" }),
      ...(message.role === "assistant" ? [regenerate] : []),
      button("Remove", () => actions.remove(message)),
    ];
  }

  _edit() {
    const { message, _actions: actions } = this;
    const field = make("textarea", { value: message.text, "aria-label": `Text of ${NAMES[message.role]}` });
    const save = (andAnswer) => actions.edit(message, field.value, andAnswer);
    const cancel = () => (this._build(), actions.updateButtons());
    field.addEventListener("input", () => fitHeight(field, 400));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save(message.role !== "assistant");
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const saveAndSend = button("Save and send", () => save(true), { class: "primary" });
    const row = make("p", { class: "row" }, button("Save", () => save(false)), button("Cancel", cancel));
    if (message.role !== "assistant") row.prepend(saveAndSend);
    this._body.replaceChildren(field, row);
    this._buttonBar.replaceChildren();
    fitHeight(field, 400);
    field.focus();
  }

  _syncCalls() {
    this.message.calls.forEach((call, i) => {
      if (!this._callTexts[i]) {
        const text = new GrowingText({ class: "arguments" });
        const name = make("p", { class: "call-name" }, make("code", { textContent: call.name }));
        this._calls.append(make("section", { class: "call", "aria-label": `Call of ${call.name}` }, name, text.element));
        this._callTexts[i] = text;
      }
      this._callTexts[i].show(call.arguments);
    });
  }

  /** Shows input fields for the results of the tool calls. Hides them if `isOpen` is false or there are no calls. */
  _showResults(isOpen) {
    const { calls } = this.message;
    this._resultsForm.hidden = !isOpen || !calls.length;
    if (this._resultsForm.hidden || this._resultsForm.firstChild) return;
    const fields = calls.map((call) => make("input", { "aria-label": `Result of ${call.name}`, placeholder: `return value of ${call.name}` }));
    const submit = make("button", { type: "submit", textContent: calls.length > 1 ? "Send results" : "Send result" });
    this._resultsForm.append(...fields, submit);
    this._resultsForm.onsubmit = (event) => {
      event.preventDefault();
      this._actions.sendResults(this.message, fields.map((field) => field.value));
    };
  }
}

/** Returns one element for each known figure of a response. */
function numbersOf(numbers) {
  if (!numbers) return [];
  const { firstToken, perSecond, prompt, cached, completion, finish } = numbers;
  const facts = [];
  const add = (value, label, title) => facts.push(make("span", { title }, make("b", { textContent: value }), ` ${label}`));
  if (firstToken !== null) add(seconds(firstToken), "to first token", "Time from sending the request to the first token");
  if (perSecond !== null) add(perSecond.toFixed(perSecond < 10 ? 1 : 0), "tokens/s", "Rate of the tokens after the first chunk, measured by this page");
  if (prompt !== null) add(String(prompt), cached ? `prompt (${cached} cached)` : "prompt", "Tokens of the prompt");
  if (completion !== null) add(String(completion), "completion", "Generated tokens");
  if (finish) facts.push(make("span", { class: "finish", title: `finish_reason: ${finish}`, textContent: FINISH_TEXTS[finish] ?? finish }));
  return facts;
}

function seconds(value) {
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(2)} s`;
}
