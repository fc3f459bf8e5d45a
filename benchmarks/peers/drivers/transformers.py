"""Driver of transformers: runs ``generate`` without compilation and with its default KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.drivers.request_loop import Generate, Settings, Tokens, answer_requests


class FirstTokenStreamer(BaseStreamer):  # type: ignore[misc]
    """A streamer that calls ``on_tokens`` at the first new token."""

    def __init__(self, on_tokens: Callable[[int], None]) -> None:
        self._on_tokens, self._num_puts = on_tokens, 0

    def put(self, value: torch.Tensor) -> None:
        """Receive tokens from `generate`, and call ``on_tokens`` for the first new token.

        The first call receives the prompt. The second call receives the first new token.
        """
        self._num_puts += 1
        if self._num_puts == 2:
            self._on_tokens(1)

    def end(self) -> None:
        """Do nothing. The interface requires this method."""


def open_engine(settings: Settings) -> Generate:
    """Load a checkpoint and return the function that generates tokens.

    All prompts have the same length. The function calls ``on_tokens`` only if there is one prompt.
    """
    torch.set_num_threads(settings.num_threads)
    dtype = getattr(torch, settings.encoding)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()

    def generate(prompts: Tokens, num_new_tokens: int, on_tokens: Callable[[int], None]) -> Tokens:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            sequences = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new_tokens,
                min_new_tokens=num_new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                streamer=FirstTokenStreamer(on_tokens) if len(prompts) == 1 else None,
            )
        return [list(map(int, row)) for row in sequences[:, ids.shape[1] :]]

    return generate


if __name__ == "__main__":
    answer_requests(open_engine)
