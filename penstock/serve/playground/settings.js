// The controls of the settings and their request fields. A request omits the fields of empty controls.

import { byId } from "./dom.js";

const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

/** Thrown if the value of a control is invalid. */
export class WrongSetting extends Error {}

export class Settings {
  constructor({ onShadingChange }) {
    this._form = byId("settings");
    byId("logprobs").addEventListener("change", () => onShadingChange(this.shades));
    byId("example-tool").addEventListener("click", () => {
      byId("tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
      this._checkTools();
    });
    byId("tools").addEventListener("change", () => this._checkTools());
    byId("example-schema").addEventListener("click", () => {
      byId("schema").value = JSON.stringify(EXAMPLE_SCHEMA, null, 2);
      this._checkSchema();
    });
    byId("schema").addEventListener("change", () => this._checkSchema());
    this._form.addEventListener("submit", (event) => event.preventDefault());
    this._form.addEventListener("reset", () => setTimeout(() => (this._checkTools(), this._checkSchema(), onShadingChange(this.shades))));
    byId("show-settings").addEventListener("click", () => this.show(!this._form.classList.contains("open")));
  }

  /** Whether tokens are shaded by their probability. */
  get shades() {
    return byId("logprobs").checked;
  }

  /** Opens or closes the controls on a narrow page. */
  show(open) {
    this._form.classList.toggle("open", open);
    byId("show-settings").setAttribute("aria-expanded", String(open));
  }

  /** Returns the request with these messages. If a control is invalid, focuses the control and throws `WrongSetting`. */
  request(messages) {
    const system = byId("system").value;
    const body = {
      model: byId("model").value,
      messages: system.trim() ? [{ role: "system", content: system }, ...messages] : messages,
    };
    for (const field of this._form.querySelectorAll("input[type=number]")) this._check(field);
    for (const field of this._form.querySelectorAll("[data-field]")) {
      if (field.value !== "") body[field.dataset.field] = field.valueAsNumber;
    }
    const stop = byId("stop").value.split("\n").filter((line) => line !== "");
    if (stop.length) body.stop = stop;
    if (this.shades) Object.assign(body, { logprobs: true, top_logprobs: byId("top-logprobs").valueAsNumber });
    const tools = this._checkTools();
    if (tools === undefined) this._refuse("tools", "the tools are not a JSON array");
    if (tools.length) body.tools = tools;
    const schema = this._checkSchema();
    if (schema === undefined) this._refuse("schema", "the schema is not a JSON object");
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "response", schema } };
    return body;
  }

  _refuse(id, message) {
    this.show(true);
    byId(`${id}-box`).open = true;
    byId(id).focus();
    throw new WrongSetting(message);
  }

  _check(field) {
    if (field.checkValidity()) return;
    this.show(true);
    field.reportValidity();
    throw new WrongSetting(field.validationMessage);
  }

  /** Returns the tools; [] if the field is empty. If it has no JSON array, shows the error and returns undefined. */
  _checkTools() {
    return this._parseJson("tools", [], (value) => (Array.isArray(value) ? "" : "This must be an array."));
  }

  /**
   * Returns the schema; null if the field is empty or has the JSON value null. If the field has anything else than a
   * JSON object, shows the error and returns undefined.
   */
  _checkSchema() {
    const isObject = (value) => value === null || (typeof value === "object" && !Array.isArray(value));
    return this._parseJson("schema", null, (value) => (isObject(value) ? "" : "This must be an object."));
  }

  _parseJson(id, empty, check) {
    const text = byId(id).value.trim();
    let value;
    let problem = "";
    try {
      value = text ? JSON.parse(text) : empty;
      problem = check(value);
    } catch (error) {
      problem = error.message;
    }
    byId(`${id}-error`).textContent = problem;
    byId(id).setAttribute("aria-invalid", String(problem !== ""));
    return problem ? undefined : value;
  }
}
