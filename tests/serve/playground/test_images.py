"""Images in the playground, run by Node with a fake page."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.documents import ROOT

PLAYGROUND = ROOT / "penstock" / "serve" / "playground"
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


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_files_pastes_and_drops(tmp_path: Path) -> None:
    for path in [*PLAYGROUND.glob("*.js"), FAKE]:
        shutil.copy(path, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "check.js").write_text(CODE)
    done = subprocess.run(
        ["node", "check.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    assert found[:4] == [[False, 0], [True, 1], [False, 1], [True, 2]]
    assert found[4] == [False, 3]
    url = "data:image/jpeg,d"
    assert found[5] == [[url, "data:image/png,e"], [], True]
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    assert found[6] == {"role": "user", "content": parts}
    assert found[7:] == [1, {"role": "user", "content": "Hi"}]
