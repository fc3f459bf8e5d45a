"""A text pipeline without a model. Each token is a function of the tokens before it.

The KV cache is real, and each step checks that the cache holds the keys of the tokens. A schedule (chunks,
batches, preemption, prefixes) is correct if the output equals the result of `expected_output_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import numpy as np
from support.kv_contexts import store_and_check_keys

from penstock.errors import PenstockError, RequestFailedError
from penstock.kv_cache import KVCacheManager
from penstock.pipelines.core import TextContext, TextGenerationResponse

EOS = 0


def next_token(tokens: list[int], vocab_size: int = 40) -> int:
    return crc32(repr(tokens).encode()) % vocab_size


def expected_output_tokens(context: TextContext) -> list[int]:
    """Return the expected output tokens of a new context, without the end-of-sequence token."""
    tokens, output = context.all_tokens.tolist(), []
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] in context.eos_token_ids:
            return output
        output.append(tokens[-1])
        if len(tokens) >= context.max_length:
            return output


class FakePipeline:
    """A ``Pipeline[TextContext, TextGenerationResponse]`` that records the rows of each step."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.trace: list[dict[str, int]] = []
        """For each step, the number of rows of each request, in batch order."""
        self.starts: list[dict[str, int]] = []
        """For each step, the start index of each request's rows."""
        self.released: list[str] = []
        self.failing_requests: set[str] = set()
        """A forward raises if its batch contains one of these requests."""
        self.failures: dict[str, PenstockError] = {}
        self.invalid_outputs: set[str] = set()
        """Requests whose output is invalid, so they fail after the forward."""

    def execute(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> dict[str, TextGenerationResponse]:
        if any(context.active_idx < context.end_idx for context in batch.values()):
            num_steps = 1
        steps_left = [self.kv.spec.steps_left(context.current_length) for context in batch.values()]
        num_steps = min([num_steps, *(steps for steps in steps_left if steps is not None)])
        for context in batch.values():
            self.kv.claim(context)
            self.kv.reserve(context, num_steps - 1)
        if self.failing_requests & batch.keys():
            raise FloatingPointError("the forward failed")
        for _ in range(num_steps):
            self._one_step([context for context in batch.values() if not context.is_done])
        for context in batch.values():
            self.kv.commit(context)
        self.failures |= {
            name: RequestFailedError("the output is invalid")
            for name in batch
            if name in self.invalid_outputs
        }
        return {
            request_id: context.outstanding_response()
            for request_id, context in batch.items()
            if request_id not in self.failures
        }

    def release(self, context: TextContext) -> None:
        self.kv.release(context)
        self.released.append(context.request_id)

    def _one_step(self, contexts: list[TextContext]) -> None:
        if not contexts:
            return
        self.trace.append({context.request_id: context.active_length for context in contexts})
        self.starts.append({context.request_id: context.start_idx for context in contexts})
        store_and_check_keys(self.kv, contexts)
        assert np.all(self.kv.inputs(contexts).lengths.numpy() > 0)
        for context in contexts:
            context.update(next_token(context.tokens[: context.active_idx].tolist()))
