"""Images in the playground, run by Node with a fake page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.node import needs_node, run_node

FAKE = Path(__file__).parent / "fake_page.js"
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
const found = [];
const event = (files) => {
  const one = { isPrevented: false, preventDefault: () => (one.isPrevented = true) };
  return Object.assign(one, { clipboardData: { files }, dataTransfer: { files } });
};
const file = (name, type = "image/png") => ({ name, type });
const settle = () => new Promise((resolve) => setTimeout(resolve, 5));
const send = async (one, id, name) => {
  byId(id).listeners[name](one);
  await settle();
  return [one.isPrevented, images.urls.length];
};

found.push(await send(event([file("a")]), "draft", "paste"));
images.enable(true);
found.push(await send(event([file("a"), file("b", "text/plain")]), "draft", "paste"));
found.push(await send(event([file("c", "text/plain")]), "document", "drop"));
found.push(await send(event([file("d", "image/jpeg")]), "document", "drop"));
byId("image-file").files = [file("e")];
byId("image-file").listeners.change();
await settle();
found.push([byId("attach").hidden, byId("attached").children.length]);
byId("attached").children[0].children[1].listeners.click();
const urls = images.take();
found.push([urls, images.urls, byId("attached").hidden]);
found.push(new Message("user", "What?", { images: urls.slice(0, 1) }).toRequest());
found.push(new Message("user", "", { images: urls.slice(0, 1) }).toRequest().content.length);
found.push(new Message("user", "Hi").toRequest());
console.log(JSON.stringify(found));
"""


@needs_node
def test_files_pastes_and_drops(tmp_path: Path) -> None:
    found: list[Any] = run_node(tmp_path, CODE, FAKE)
    assert found[:4] == [[False, 0], [True, 1], [False, 1], [True, 2]]
    assert found[4] == [False, 3]
    url = "data:image/jpeg,d"
    assert found[5] == [[url, "data:image/png,e"], [], True]
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    assert found[6] == {"role": "user", "content": parts}
    assert found[7:] == [1, {"role": "user", "content": "Hi"}]
