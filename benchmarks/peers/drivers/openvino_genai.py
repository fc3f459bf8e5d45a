"""Driver of OpenVINO GenAI: runs its continuous batching pipeline on the CPU, without a prefix cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino
import openvino_genai as api

from benchmarks.peers.drivers.request_loop import Generate, Settings, Tokens, answer_requests


class CountingStreamer(api.StreamerBase):  # type: ignore[misc]
    """A streamer that calls ``on_tokens`` with the number of tokens of each output."""

    def __init__(self, on_tokens: Callable[[int], None]) -> None:
        super().__init__()
        self._on_tokens = on_tokens

    def write(self, token: int | list[int]) -> api.StreamingStatus:
        """Report one token or a list of tokens."""
        self._on_tokens(len(token) if isinstance(token, list) else 1)
        return api.StreamingStatus.RUNNING

    def end(self) -> None:
        """Do nothing. The interface requires this method."""


def open_engine(settings: Settings) -> Generate:
    """Load the folder of a model that optimum-intel exported. Return the function that generates tokens.

    The function calls ``on_tokens`` only if there is one prompt.
    """
    scheduling = api.SchedulerConfig()
    scheduling.enable_prefix_caching = False
    scheduling.max_num_seqs = settings.num_prompts
    properties = {"INFERENCE_NUM_THREADS": settings.num_threads}
    pipeline = api.ContinuousBatchingPipeline(settings.model, scheduling, "CPU", properties)

    def generate(prompts: Tokens, num_new_tokens: int, on_tokens: Callable[[int], None]) -> Tokens:
        config = api.GenerationConfig(max_new_tokens=num_new_tokens, ignore_eos=True, do_sample=False)
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        streamer = CountingStreamer(on_tokens) if len(prompts) == 1 else None
        results = pipeline.generate(tensors, [config] * len(prompts), streamer)
        return [list(result.m_generation_ids[0]) for result in results]

    return generate


if __name__ == "__main__":
    answer_requests(open_engine)
