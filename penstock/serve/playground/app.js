// Connects the modules: the conversation with one running response at a time, the settings, the panel and the pages.

import { Message, streamInto } from "./answer.js";
import { ApiError, apiKey, getJson } from "./api.js";
import { CodeDialog } from "./code.js";
import { CompareView } from "./compare.js";
import { Conversations } from "./conversations.js";
import { button, byId, fitHeight } from "./dom.js";
import { Attachments } from "./images.js";
import { MessageView } from "./messages.js";
import { MetricsPage } from "./metrics.js";
import { Pages } from "./pages.js";
import { Panel } from "./panel.js";
import { Settings, WrongSetting } from "./settings.js";
import { SimilarityView } from "./similarity.js";
import { SpeechView } from "./speech.js";
import { hideAlternatives } from "./tokens.js";

const EXAMPLES = ["What is a penstock?", "Tell me a story about a river.", "Write a JSON object that describes a cat."];
const NEAR_END_PIXELS = 80; // the conversation follows new text if it is scrolled closer to its end than this

const log = byId("log");
const draft = byId("draft");

class App {
  constructor() {
    this._views = [];
    this._controller = null; // the AbortController of a running response
    this._conversations = new Conversations();
    this._settings = new Settings({ onShadingChange: (shades) => this._shade(shades) });
    this._attachments = new Attachments();
    const onerror = (error) => this._onError(error);
    this._compare = new CompareView({
      settings: this._settings,
      onerror,
      onchange: () => this.updateButtons(),
      onannounce: (text) => this._announce(text),
    });
    this._metrics = new MetricsPage({ onerror, onannounce: (text) => this._announce(text) });
    this._pages = new Pages({ onpage: (page) => this._onPage(page) });
    this._listen();
    new SimilarityView({ onerror });
    this._speech = new SpeechView({ onerror });
    this._panel = new Panel({ onstate: (state) => this._onState(state) });
    this._listConversations();
  }

  // Actions of the user.

  /**
   * Adds the text and images of the input field to the conversation and requests a response. On the Compare page,
   * requests two answers to them instead.
   */
  send() {
    if (this._isBusy) return;
    const text = draft.value;
    if (this._pages.current === "compare") {
      if (!this._compare.send(text, this._attachments.urls)) return;
      this._attachments.removeAll();
      draft.value = "";
      fitHeight(draft);
      return;
    }
    const lastMessage = this._views.at(-1)?.message;
    const isNew = text.trim() || this._attachments.urls.length > 0;
    if (!isNew && (!lastMessage || lastMessage.role === "assistant")) return;
    if (!this._checkSettings()) return;
    if (isNew) {
      this._add(new Message("user", text, { images: this._attachments.removeAll() }));
      draft.value = "";
      fitHeight(draft);
    }
    this._answer();
  }

  stop() {
    this._controller?.abort();
    this._compare.stop();
  }

  get _isBusy() {
    return this._controller !== null || this._compare.isRunning;
  }

  edit(message, text, andAnswer) {
    if (andAnswer && !this._checkSettings()) return;
    message.edit(text);
    this._viewOf(message).shade(this._settings.shades);
    if (andAnswer) {
      this._removeViewsFrom(this._views.indexOf(this._viewOf(message)) + 1);
      this._answer();
    }
    this.updateButtons();
    this._save();
  }

  /** Opens a new conversation with a copy of the messages up to `message`. */
  branch(message) {
    const copiedViews = this._views.slice(0, this._views.indexOf(this._viewOf(message)) + 1);
    this._save();
    this._conversations.begin();
    this._show(copiedViews.map((view) => view.message));
    this._save();
    this._announce("This is a new conversation with a copy of the messages up to the chosen message.");
    draft.focus();
  }

  remove(message) {
    const view = this._viewOf(message);
    this._views = this._views.filter((other) => other !== view);
    view.element.remove();
    this.updateButtons();
    this._save();
    draft.focus();
  }

  regenerate(message) {
    if (!this._checkSettings()) return;
    this._removeViewsFrom(this._views.indexOf(this._viewOf(message)));
    this._answer();
  }

  retry(message) {
    this.regenerate(message);
  }

  sendResults(message, results) {
    if (!this._checkSettings()) return;
    message.calls.forEach((call, i) => this._add(new Message("tool", results[i], { callId: call.id })));
    this._answer();
  }

  clear() {
    this.stop();
    this._save();
    this._conversations.begin();
    this._removeViewsFrom(0);
    this._listConversations();
    this.updateButtons();
    draft.focus();
  }

  // A response.

  async _answer() {
    const body = this._request();
    const message = new Message("assistant", "", { isLive: true });
    const view = this._add(message);
    const controller = new AbortController();
    this._controller = controller;
    this.updateButtons();
    this._announce("The model is responding.");
    await streamInto(message, body, controller.signal, () => this._scheduleSync(view));
    if (message.error) this._onError(message.error);
    this._controller = null;
    if (this._views.includes(view)) this._save();
    this._keepScrolled(() => view.shade(this._settings.shades));
    this.updateButtons();
    this._announceEnd(message);
  }

  _onError(error) {
    if (error.status === 401) this._askForKey(error);
    if (error.code === "model_not_found") this._loadModels();
  }

  _announceEnd({ error, numbers }) {
    if (error) this._announce(`The response failed: ${error.message}`);
    else this._announce(`The response has ended, ${numbers?.completion ?? 0} tokens.`);
  }

  /** Updates the view of a message in the next animation frame. */
  _scheduleSync(view) {
    if (view.isSyncScheduled) return;
    view.isSyncScheduled = true;
    requestAnimationFrame(() => {
      view.isSyncScheduled = false;
      if (view.message.isLive) this._keepScrolled(() => view.sync());
    });
  }

  // The conversation.

  /** Stores the conversation in the browser. */
  _save() {
    this._conversations.save(this._views.map((view) => view.message).filter((message) => !message.isEmpty));
    this._listConversations();
  }

  _open(id) {
    this.stop();
    const messages = this._conversations.open(id);
    if (messages === null) this._conversations.begin();
    this._show(messages ?? []);
    this._listConversations();
    draft.focus();
  }

  _show(messages) {
    this._removeViewsFrom(0);
    for (const message of messages) this._add(message);
    this.updateButtons();
  }

  _listConversations() {
    const { all, current } = this._conversations;
    const select = byId("conversations");
    const options = all.map(({ id, title }) => new Option(title, id, false, id === current));
    if (current === null) options.unshift(new Option("New conversation", "", true, true));
    select.replaceChildren(...options);
    select.disabled = options.length < 2;
    byId("delete-chat").hidden = current === null;
  }

  /** Returns the next request. `withDraft` includes the text in the input field, for the code view. */
  _request(withDraft = false) {
    const messages = this._views.map((view) => view.message).filter((message) => !message.isEmpty);
    const requestMessages = messages.map((message) => message.toRequest());
    const images = this._attachments.urls;
    if (withDraft && (draft.value.trim() || images.length || !requestMessages.length)) {
      requestMessages.push(new Message("user", draft.value || "Hello", { images }).toRequest());
    }
    return this._settings.request(requestMessages);
  }

  /** Returns whether the settings are valid. If they are not, the page shows the error. */
  _checkSettings() {
    try {
      this._request();
      return true;
    } catch (error) {
      if (!(error instanceof WrongSetting)) throw error;
      return false;
    }
  }

  _add(message) {
    const view = new MessageView(message, { actions: this, shades: this._settings.shades });
    this._views.push(view);
    log.append(view.element);
    log.scrollTop = log.scrollHeight;
    this.updateButtons();
    return view;
  }

  _removeViewsFrom(index) {
    for (const view of this._views.splice(index)) view.element.remove();
  }

  _viewOf(message) {
    return this._views.find((view) => view.message === message);
  }

  _shade(shades) {
    hideAlternatives();
    this._keepScrolled(() => this._views.forEach((view) => view.shade(shades)));
    this._compare.shade(shades);
    this.updateButtons();
  }

  /** Shows and enables the buttons that apply to the current state. Hides or disables the others. */
  updateButtons() {
    const isBusy = this._isBusy;
    byId("empty").hidden = this._views.length > 0;
    byId("send").hidden = isBusy;
    byId("stop-answer").hidden = !isBusy;
    log.setAttribute("aria-busy", String(this._controller !== null));
    this._views.forEach((view, i) => view.updateControls({ isLast: i === this._views.length - 1, isBusy }));
  }

  _keepScrolled(change) {
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PIXELS;
    change();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  // The server.

  _onState(state) {
    if (state === "ready") this._loadModels();
    else if (state === "starting") this._notice("The model is loading. This page updates when the model is ready.");
  }

  async _loadModels() {
    const select = byId("model");
    try {
      const { data } = await getJson("v1/models");
      const selectedModel = select.value;
      select.replaceChildren(...data.map(({ id }) => new Option(id, id)));
      if (data.some(({ id }) => id === selectedModel)) select.value = selectedModel;
      select.title = `at most ${data[0].max_model_len} tokens, prompt and output together`;
      select.disabled = false;
      this._compare.setModels(data.map(({ id }) => id));
      byId("key-form").hidden = true;
      byId("forget-key").hidden = !apiKey.get();
      this._models = data;
      this._showTask();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) this._askForKey(error);
      else this._notice(error.message);
    }
  }

  /** Shows the page of the chosen model's task. */
  _showTask() {
    const model = this._models.find(({ id }) => id === byId("model").value);
    this._attachments.enable(model.input_modalities.includes("image"));
    this._pages.setModel(model);
    if (this._pages.kind === "speech") this._speech.load().catch((error) => this._onError(error));
    const scoresNotice = "This model scores texts. Use it through /v1/rerank, /v1/score or /classify.";
    this._notice(this._pages.kind === "scores" ? scoresNotice : "");
  }

  _onPage(page) {
    hideAlternatives();
    this._metrics.show(page === "metrics");
  }

  _askForKey(error) {
    byId("key-form").hidden = false;
    byId("key-error").textContent = apiKey.get() ? error.message : "";
    byId("key").focus();
  }

  _notice(text) {
    byId("notice").textContent = text;
    byId("notice").hidden = !text;
  }

  _announce(text) {
    byId("announce").textContent = text;
  }

  // Event listeners.

  _listen() {
    byId("composer").addEventListener("submit", (event) => (event.preventDefault(), this.send()));
    draft.addEventListener("input", () => fitHeight(draft));
    draft.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || byId("code").open) return;
      if (!byId("alternatives").hidden) hideAlternatives();
      this.stop();
    });
    log.addEventListener("scroll", () => hideAlternatives(), { passive: true });
    byId("stop-answer").addEventListener("click", () => (this.stop(), draft.focus()));
    byId("new-chat").addEventListener("click", () => this.clear());
    byId("model").addEventListener("change", () => this._showTask());
    byId("conversations").addEventListener("change", () => this._open(byId("conversations").value));
    byId("delete-chat").addEventListener("click", () => {
      this._conversations.remove(this._conversations.current);
      this._open(null);
    });
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      apiKey.set(byId("key").value.trim());
      byId("key").value = "";
      this._loadModels();
      this._metrics.show(this._pages.current === "metrics");
    });
    byId("forget-key").addEventListener("click", () => (apiKey.remove(), this._loadModels()));
    for (const text of EXAMPLES) byId("examples").append(button(text, () => ((draft.value = text), this.send())));
    new CodeDialog({ check: () => this._checkSettings(), request: () => this._request(true) });
  }
}

new App();
