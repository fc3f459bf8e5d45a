"""Driver of vLLM's CPU build.

The driver calls the engine's ``step`` itself, so that it can time each output.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count

from benchmarks.peers.drivers.request_loop import Generate, Settings, Tokens, answer_requests


def open_engine(settings: Settings) -> Generate:
    """Load a checkpoint.

    The engine core runs in this process, so that no messages between processes are timed.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{settings.num_threads - 1}")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        str(settings.model),
        dtype=settings.encoding,
        skip_tokenizer_init=True,
        max_model_len=settings.max_length,
        max_num_seqs=settings.num_prompts,
        enable_prefix_caching=False,
        disable_log_stats=True,
    ).llm_engine
    request_numbers = count()

    def generate(prompts: Tokens, num_new_tokens: int, on_tokens: Callable[[int], None]) -> Tokens:
        params = SamplingParams(
            max_tokens=num_new_tokens,
            min_tokens=num_new_tokens,
            ignore_eos=True,
            temperature=0,
            detokenize=False,
        )
        request_ids = [str(next(request_numbers)) for _ in prompts]
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), params)
        answers: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
                on_tokens(len(answers[output.request_id]))
        return [answers[request_id] for request_id in request_ids]

    return generate


if __name__ == "__main__":
    answer_requests(open_engine)
