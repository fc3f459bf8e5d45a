"""Driver of llama.cpp through the C API of llama-cpp-python: contiguous sequences, greedy sampling."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp as api

from benchmarks.peers.drivers.answering import Generate, Settings, Tokens, answer_requests

BATCH = 2048  # maximum tokens per call; the library splits them into micro-batches of 512


def open_engine(settings: Settings) -> Generate:
    """Load a GGUF file.

    A context has a fixed number of prompts and a fixed length. A run with other sizes makes a new context.
    """
    api.llama_backend_init()
    quiet = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(quiet, ctypes.c_void_p(0))
    model = api.llama_model_load_from_file(str(settings.model).encode(), api.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {settings.model}")
    sampler = api.llama_sampler_init_greedy()
    batch = api.llama_batch_init(BATCH, 0, 1)
    kept: dict[str, Any] = {
        "size": (0, 0),
        "context": None,
        "log": quiet,
    }  # a callback must outlive its calls

    def context_for(prompts: int, length: int) -> Any:
        if kept["size"] != (prompts, length):
            if kept["context"]:
                api.llama_free(kept["context"])
            params = api.llama_context_default_params()
            params.n_seq_max = prompts
            params.n_ctx = prompts * length
            params.n_batch = BATCH
            params.n_threads = params.n_threads_batch = settings.threads
            context = api.llama_init_from_model(model, params)
            if not context:
                raise RuntimeError(f"llama.cpp has no context of {prompts} x {length} tokens")
            kept.update(size=(prompts, length), context=context)
        api.llama_memory_clear(api.llama_get_memory(kept["context"]), False)
        return kept["context"]

    def run(context: Any, entries: list[tuple[int, int, int, bool]]) -> Iterator[tuple[int, int]]:
        """Run entries (token, position, sequence, is_last). Yields (sequence, next token) if is_last."""
        for start in range(0, len(entries), BATCH):
            part = entries[start : start + BATCH]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, is_last) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_last
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if error := api.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returned {error}")
            for i, (_, _, sequence, is_last) in enumerate(part):
                if is_last:
                    yield sequence, api.llama_sampler_sample(sampler, context, i)

    def generate(prompts: Tokens, new_tokens: int, arrived: Callable[[int], None]) -> Tokens:
        context = context_for(len(prompts), max(map(len, prompts)) + new_tokens)
        found: Tokens = [[] for _ in prompts]
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for step in range(new_tokens):
            for sequence, token in run(context, entries):
                found[sequence].append(token)
            if step == 0:
                arrived(1)
            entries = [(new[-1], len(prompts[i]) + step, i, True) for i, new in enumerate(found)]
        return found

    return generate


if __name__ == "__main__":
    answer_requests(open_engine)
