"""Image attachments of the playground, run by Node with a fake page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.node import needs_node, run_node

FAKE_PAGE = Path(__file__).parent / "fake_page.js"
CODE = """
import { byId } from "./fake_page.js";
import { Message } from "./answer.js";
globalThis.document.addEventListener = (name, listener) => (byId("document").listeners[name] = listener);
globalThis.FileReader = class {
  addEventListener(name, listener) { this[name] = listener; }
  readAsDataURL(file) { this.result = `data:${file.type},${file.name}`; queueMicrotask(() => this.load()); }
};
const { Attachments } = await import("./images.js");
const images = new Attachments();
const results = [];
const makeEvent = (files) => {
  const event = { isPrevented: false, preventDefault: () => (event.isPrevented = true) };
  return Object.assign(event, { clipboardData: { files }, dataTransfer: { files } });
};
const file = (name, type = "image/png") => ({ name, type });
const settle = () => new Promise((resolve) => setTimeout(resolve, 5));
const send = async (event, id, name) => {
  byId(id).listeners[name](event);
  await settle();
  return [event.isPrevented, images.urls.length];
};

results.push(await send(makeEvent([file("a")]), "draft", "paste"));
images.enable(true);
results.push(await send(makeEvent([file("a"), file("b", "text/plain")]), "draft", "paste"));
results.push(await send(makeEvent([file("c", "text/plain")]), "document", "drop"));
results.push(await send(makeEvent([file("d", "image/jpeg")]), "document", "drop"));
byId("image-file").files = [file("e")];
byId("image-file").listeners.change();
await settle();
results.push([byId("attach").hidden, byId("attached").children.length]);
byId("attached").children[0].children[1].listeners.click();
const urls = images.removeAll();
results.push([urls, images.urls, byId("attached").hidden]);
results.push(new Message("user", "What?", { images: urls.slice(0, 1) }).toRequest());
results.push(new Message("user", "", { images: urls.slice(0, 1) }).toRequest().content.length);
results.push(new Message("user", "Hi").toRequest());
console.log(JSON.stringify(results));
"""


@needs_node
def test_images_are_attached_by_selection_paste_and_drop_and_are_sent_in_messages(tmp_path: Path) -> None:
    results: list[Any] = run_node(tmp_path, CODE, FAKE_PAGE)
    assert results[:4] == [[False, 0], [True, 1], [False, 1], [True, 2]]
    assert results[4] == [False, 3]
    url = "data:image/jpeg,d"
    assert results[5] == [[url, "data:image/png,e"], [], True]
    content_parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    assert results[6] == {"role": "user", "content": content_parts}
    assert results[7:] == [1, {"role": "user", "content": "Hi"}]
