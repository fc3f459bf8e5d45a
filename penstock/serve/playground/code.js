// The dialog that shows the current request as a command or a program.

import { urlOf } from "./api.js";
import { byId, copyText } from "./dom.js";
import { curl, python } from "./snippets.js";

const SNIPPETS = { curl, python };

export class CodeDialog {
  /** `check()` returns whether the settings are valid, and `request()` the current request. */
  constructor({ check, request }) {
    this._request = request;
    this._language = "curl";
    byId("show-code").addEventListener("click", () => {
      if (!check()) return;
      this._show();
      byId("code").showModal();
    });
    for (const tab of document.querySelectorAll("[data-language]")) {
      tab.addEventListener("click", () => {
        this._language = tab.dataset.language;
        this._show();
      });
    }
    byId("copy-code").addEventListener("click", async () => {
      const isCopied = await copyText(byId("snippet").textContent);
      byId("copy-code").textContent = isCopied ? "Copied" : "Select and copy";
      if (!isCopied) getSelection().selectAllChildren(byId("snippet"));
    });
  }

  _show() {
    byId("snippet").textContent = SNIPPETS[this._language](this._request(), urlOf("./"));
    byId("copy-code").textContent = "Copy";
    for (const tab of document.querySelectorAll("[data-language]")) {
      tab.setAttribute("aria-pressed", String(tab.dataset.language === this._language));
    }
  }
}
