"""Driver of transformers: ``generate`` in eager mode with its default cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.drivers.answering import Generate, Settings, Tokens, answer_requests


class Arrivals(BaseStreamer):  # type: ignore[misc]
    """Calls ``arrived`` at the first new token. The first `put` is the prompt."""

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self._arrived, self._puts = arrived, 0

    def put(self, value: torch.Tensor) -> None:
        """Count the calls: the first is the prompt, the second the first new token."""
        self._puts += 1
        if self._puts == 2:
            self._arrived(1)

    def end(self) -> None:
        """Do nothing at the end of the answer."""


def open_engine(settings: Settings) -> Generate:
    """Load a checkpoint."""
    torch.set_num_threads(settings.threads)
    dtype = getattr(torch, settings.encoding)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()

    def generate(prompts: Tokens, new_tokens: int, arrived: Callable[[int], None]) -> Tokens:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                streamer=Arrivals(arrived) if len(prompts) == 1 else None,
            )
        return [list(map(int, row)) for row in whole[:, ids.shape[1] :]]

    return generate


if __name__ == "__main__":
    answer_requests(open_engine)
