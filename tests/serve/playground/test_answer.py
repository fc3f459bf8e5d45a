"""Times and token rate of an answer in the playground, computed by Node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.node import needs_node, run_node

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
    receiver.addChunk(chunk("x", tokens));
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


@needs_node
def test_the_rate_needs_a_measurable_time(tmp_path: Path) -> None:
    """One read can return several chunks of a fast model, which then arrive 0.1 ms apart."""
    figures: list[Any] = run_node(tmp_path, CODE)
    assert figures == [[0.1, 10, 18], [0.1, None, 18], [0.1, None, 8]]
