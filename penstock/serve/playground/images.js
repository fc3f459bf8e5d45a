// Images of the next message: chosen, pasted or dropped, shown as thumbnails until the message is sent.

import { button, byId, make } from "./dom.js";

/** Returns the content of a file as a data: URL. */
function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

/** Returns the image files of a paste or a drop. */
export function imagesOf(transfer) {
  return [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
}

/** Returns elements that show images. */
export function thumbnails(urls) {
  return urls.map((url, i) => make("img", { src: url, alt: `Image ${i + 1}`, class: "image" }));
}

/** The images of the next message, as data: URLs. `isEnabled` is true if the model reads images. */
export class Attachments {
  constructor() {
    this.urls = [];
    this.isEnabled = false;
    this._field = byId("image-file");
    this._list = byId("attached");
    this._listen();
  }

  /** Shows or hides the button for images. If the model does not read images, removes all images. */
  enable(isEnabled) {
    this.isEnabled = isEnabled;
    byId("attach").hidden = !isEnabled;
    if (!isEnabled) this.removeAll();
  }

  /** Adds image files. Does nothing if the model does not read images. */
  async add(files) {
    if (!this.isEnabled) return;
    this.urls.push(...(await Promise.all(files.map(dataUrl))));
    this._show();
  }

  /** Returns the images and removes them from the next message. */
  removeAll() {
    const { urls } = this;
    this.urls = [];
    this._show();
    return urls;
  }

  _show() {
    const items = thumbnails(this.urls).map((image, i) => {
      const remove = button("×", () => (this.urls.splice(i, 1), this._show()), { "aria-label": `Remove image ${i + 1}` });
      return make("span", { class: "attachment" }, image, remove);
    });
    this._list.replaceChildren(...items);
    this._list.hidden = !items.length;
  }

  _listen() {
    byId("attach").addEventListener("click", () => this._field.click());
    this._field.addEventListener("change", () => {
      this.add([...this._field.files]);
      this._field.value = "";
    });
    byId("draft").addEventListener("paste", (event) => this._addFrom(event, event.clipboardData));
    document.addEventListener("dragover", (event) => this.isEnabled && event.preventDefault());
    document.addEventListener("drop", (event) => this._addFrom(event, event.dataTransfer));
  }

  _addFrom(event, transfer) {
    const files = imagesOf(transfer);
    if (!this.isEnabled || !files.length) return;
    event.preventDefault();
    this.add(files);
  }
}
