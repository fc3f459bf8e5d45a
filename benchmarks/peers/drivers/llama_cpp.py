"""Driver of llama.cpp through the C API in llama-cpp-python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp as api

from benchmarks.peers.drivers.request_loop import Generate, Settings, Tokens, answer_requests

BATCH_SIZE = 2048  # maximum tokens per call; llama.cpp splits a call into micro-batches of 512


def open_engine(settings: Settings) -> Generate:
    """Load a GGUF file and return the function that generates tokens.

    A llama.cpp context has a fixed number of sequences and a fixed length. A request with another number of
    prompts or another length replaces the context.
    """
    api.llama_backend_init()
    discard_log = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(discard_log, ctypes.c_void_p(0))
    model = api.llama_model_load_from_file(str(settings.model).encode(), api.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {settings.model}")
    sampler = api.llama_sampler_init_greedy()
    batch = api.llama_batch_init(BATCH_SIZE, 0, 1)
    state: dict[str, Any] = {
        "shape": (0, 0),  # number and length of the sequences of the context
        "context": None,
        "log": discard_log,  # keeps a reference, because llama.cpp calls the function as long as it runs
    }

    def make_context(num_sequences: int, sequence_length: int) -> Any:
        """Return an empty context for ``num_sequences`` sequences of ``sequence_length`` tokens."""
        if state["shape"] != (num_sequences, sequence_length):
            if state["context"]:
                api.llama_free(state["context"])
            params = api.llama_context_default_params()
            params.n_seq_max = num_sequences
            params.n_ctx = num_sequences * sequence_length
            params.n_batch = BATCH_SIZE
            params.n_threads = params.n_threads_batch = settings.num_threads
            context = api.llama_init_from_model(model, params)
            if not context:
                raise RuntimeError(
                    f"llama.cpp cannot create a context for {num_sequences} sequences of "
                    f"{sequence_length} tokens"
                )
            state.update(shape=(num_sequences, sequence_length), context=context)
        api.llama_memory_clear(api.llama_get_memory(state["context"]), False)
        return state["context"]

    def run(context: Any, entries: list[tuple[int, int, int, bool]]) -> Iterator[tuple[int, int]]:
        """Run the entries (token, position, sequence, is_last) of a batch.

        Yields (sequence, next token) for each entry with ``is_last``.
        """
        for start in range(0, len(entries), BATCH_SIZE):
            chunk = entries[start : start + BATCH_SIZE]
            batch.n_tokens = len(chunk)
            for i, (token, position, sequence, is_last) in enumerate(chunk):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_last
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if error := api.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returned the error {error}")
            for i, (_, _, sequence, is_last) in enumerate(chunk):
                if is_last:
                    yield sequence, api.llama_sampler_sample(sampler, context, i)

    def generate(prompts: Tokens, num_new_tokens: int, on_tokens: Callable[[int], None]) -> Tokens:
        context = make_context(len(prompts), max(map(len, prompts)) + num_new_tokens)
        answers: Tokens = [[] for _ in prompts]
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for step in range(num_new_tokens):
            for sequence, token in run(context, entries):
                answers[sequence].append(token)
            if step == 0:
                on_tokens(1)
            entries = [(answer[-1], len(prompts[i]) + step, i, True) for i, answer in enumerate(answers)]
        return answers

    return generate


if __name__ == "__main__":
    answer_requests(open_engine)
