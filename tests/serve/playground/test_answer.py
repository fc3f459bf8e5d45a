"""The figures of an answer in the playground, run by Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.documents import ROOT

PLAYGROUND = ROOT / "penstock" / "serve" / "playground"
CODE = """
import { Message, Receiver } from "./answer.js";
const chunk = (content, tokens) => ({
  choices: [{ delta: { content }, finish_reason: null }],
  usage: { prompt_tokens: 3, completion_tokens: tokens },
});
const figures = (...times) => {
  let now = 0;
  const message = new Message("assistant");
  const receiver = new Receiver(message, () => now);
  times.forEach(([time, tokens]) => {
    now = time;
    receiver.take(chunk("x", tokens));
  });
  receiver.end();
  return [message.numbers.firstToken, message.numbers.perSecond, message.numbers.completion];
};
console.log(JSON.stringify([
  figures([100, 8], [1100, 18]),
  figures([100, 8], [100.1, 18]),
  figures([100, 8]),
]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_rate_needs_a_measurable_time(tmp_path: Path) -> None:
    """Chunks of a fast model can arrive in one read, a tenth of a millisecond after each other."""
    for path in PLAYGROUND.glob("*.js"):
        shutil.copy(path, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "check.js").write_text(CODE)
    done = subprocess.run(
        ["node", "check.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    assert found == [[0.1, 10, 18], [0.1, None, 18], [0.1, None, 8]]
