"""A fake tokenizer and a fake pipeline, for tests of code that uses Penstock.

They need no weights and no files:

    >>> from penstock.pipelines.core import TokenGeneratorRequest
    >>> tokenizer, pipeline = FakeTokenizer(), FakePipeline.saying("Hello!")
    >>> context = tokenizer.build_context(TokenGeneratorRequest("1", 0, "fake", prompt="Hi"))
    >>> response = pipeline.execute({context.request_id: context}, num_steps=10)[context.request_id]
    >>> tokenizer.decode_ids([token.next_token for token in response.tokens]), response.is_done
    ('Hello!', True)

Importing this module does not import torch.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar
from zlib import crc32

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.errors import InputError, PenstockError
from penstock.kv_cache.interface import KVCache, NullKVCache
from penstock.pipelines.core import (
    LogProbabilities,
    TextContext,
    TextGenerationResponse,
)
from penstock.text.tokenizer import TextTokenizer
from penstock.text.tokenizer_files import TokenizerFiles

if TYPE_CHECKING:
    from penstock.pipelines.core import Pipeline

__all__ = ["FakePipeline", "FakeTokenizer"]

_LETTERS = (string.ascii_lowercase + " ").encode()


class FakeTokenizer(TextTokenizer):
    """A `TextTokenizer` whose token ids are the bytes of UTF-8: ASCII characters are their own ids.

    Limits, stop strings, chat template and thread safety are those of `TextTokenizer`.

    Args:
        max_length: the maximum number of tokens of prompt and output together; None sets no limit.
        template: the Jinja text of the chat template; None for a tokenizer without a template.
        special_tokens_in_content: see `TextTokenizer`.
    """

    EOS: ClassVar[int] = 256
    """The end-of-sequence token ``<|end|>``, the only id that is not a byte."""
    TEMPLATE: ClassVar[str] = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )

    def __init__(
        self,
        *,
        max_length: int | None = 2048,
        template: str | None = TEMPLATE,
        special_tokens_in_content: bool = False,
    ) -> None:
        files = TokenizerFiles(
            origin="FakeTokenizer",
            tokenizer=_byte_tokenizer("<|end|>"),
            special_tokens={"eos_token": "<|end|>"},
            templates={} if template is None else {"default": template},
            eos_token_ids=(self.EOS,),
            vocab_size=self.EOS + 1,
            max_length=max_length,
        )
        super().__init__(files, special_tokens_in_content=special_tokens_in_content)


class FakePipeline:
    """A deterministic pipeline without a model: the next token is a function of the context.

    It implements `penstock.pipelines.core.Pipeline` and works with a scheduler and any KV cache. Prompt
    chunks, several steps per call, preemption and release work as in `TextGenerationPipeline`. The pipeline
    supports ``min_new_tokens``. The context ends the output at its end tokens and at its maximum length. The
    pipeline ignores all other parameters that change the choice of tokens. All log probabilities are 0.

    Args:
        choose: returns the next token of a context whose tokens are all computed. The default returns
            lower-case letters and spaces that depend on all tokens so far, and `FakeTokenizer.EOS` for about
            one context in 16.
        kv: the KV cache; the default stores nothing.
    """

    def __init__(
        self, choose: Callable[[TextContext], int] | None = None, *, kv: KVCache | None = None
    ) -> None:
        self.kv: KVCache = NullKVCache() if kv is None else kv
        self.batches: list[dict[str, int]] = []
        """One entry for each forward pass: request id -> number of tokens that the pass computes."""
        self.failures: dict[str, PenstockError] = {}
        """See `penstock.pipelines.core.Pipeline`; this class never adds an entry."""
        self._choose = choose if choose is not None else _letter_after

    @classmethod
    def saying(cls, text: str, *, kv: KVCache | None = None) -> FakePipeline:
        """Return a pipeline that generates the same text for each request, in tokens of a `FakeTokenizer`."""
        answer = [*text.encode(), FakeTokenizer.EOS]
        return cls(lambda context: answer[min(len(context.generated_tokens), len(answer) - 1)], kv=kv)

    @classmethod
    def answering(cls, answer: Callable[[str], str], *, kv: KVCache | None = None) -> FakePipeline:
        """Return a pipeline whose output is a function of the prompt, in tokens of a `FakeTokenizer`.

        >>> pipeline = FakePipeline.answering(lambda prompt: f"You said {prompt}.")
        """

        def choose(context: TextContext) -> int:
            prompt = bytes(token for token in context.prompt_tokens.tolist() if token < FakeTokenizer.EOS)
            tokens: list[int] = [*answer(prompt.decode(errors="replace")).encode(), FakeTokenizer.EOS]
            return tokens[min(len(context.generated_tokens), len(tokens) - 1)]

        return cls(choose, kv=kv)

    def execute(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> dict[str, TextGenerationResponse]:
        """Run up to ``num_steps`` steps and return the new tokens of each context.

        Fewer steps run if a context would otherwise exceed its maximum length. Only one step runs if this
        call computes only a part of a context's prompt, or if a context reports log probabilities.

        Raises:
            InputError: ``num_steps`` is less than 1, or a request has ended.
            InsufficientBlocksError: the KV cache has too few free blocks.
        """
        if num_steps < 1:
            raise InputError(f"num_steps must be at least 1, was {num_steps}")
        for request_id, context in batch.items():
            if context.is_done:
                raise InputError(f"request {request_id} has ended ({context.status.value})")
        if any(
            context.active_idx < context.end_idx or context.log_probabilities for context in batch.values()
        ):
            num_steps = 1
        max_steps = min(
            (context.max_length - context.current_length for context in batch.values()), default=1
        )
        num_steps = max(1, min(num_steps, max_steps))
        for context in batch.values():
            self.kv.claim(context)
            self.kv.reserve(context, num_steps - 1)
        for _ in range(num_steps):
            self._step(batch)
        for context in batch.values():
            self.kv.commit(context)
        return {request_id: context.outstanding_response() for request_id, context in batch.items()}

    def release(self, context: TextContext) -> None:
        """Free the KV blocks of a context. Do nothing if it has none."""
        self.kv.release(context)

    def _step(self, batch: Mapping[str, TextContext]) -> None:
        running = {request_id: context for request_id, context in batch.items() if not context.is_done}
        if running:
            self.batches.append(
                {request_id: context.active_length for request_id, context in running.items()}
            )
        for context in running.values():
            token = self._next_token(context)
            context.update(
                token, _zero_log_probabilities(context, token) if context.log_probabilities else None
            )

    def _next_token(self, context: TextContext) -> int:
        if context.active_idx < context.end_idx:
            # update() ignores this token, because the prompt continues
            return int(context.all_tokens[context.active_idx])
        token = self._choose(context)
        if token in context.eos_token_ids and len(context.generated_tokens) < context.min_tokens:
            return next(letter for letter in _LETTERS if letter not in context.eos_token_ids)
        return token


def _letter_after(context: TextContext) -> int:
    """Return a letter, a space or `FakeTokenizer.EOS`, chosen by a checksum of all tokens of the context."""
    checksum = crc32(context.all_tokens.astype(np.int64).tobytes())
    return FakeTokenizer.EOS if checksum % 16 == 0 else _LETTERS[checksum // 16 % len(_LETTERS)]


def _zero_log_probabilities(context: TextContext, token: int) -> LogProbabilities:
    """Return log probability 0 for the new token; with echo also for the step's tokens except the first."""
    echoed_tokens = context.all_tokens[context.start_idx + 1 : context.active_idx].tolist()
    tokens = [*(echoed_tokens if context.log_probabilities_echo else ()), token]
    return LogProbabilities([0.0] * len(tokens), [{token: 0.0} for token in tokens])


def _byte_tokenizer(*special_tokens: str) -> Tokenizer:
    """Return a tokenizer of the 256 bytes, whose ids are their values, followed by special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special_tokens])
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    """Return the byte-level vocabulary: printable bytes as their characters, others from U+0100 on."""
    printable_bytes = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    other_bytes = [byte for byte in range(256) if byte not in printable_bytes]
    return {
        chr(byte) if byte in printable_bytes else chr(256 + other_bytes.index(byte)): byte
        for byte in range(256)
    }


if TYPE_CHECKING:
    _pipeline: Pipeline[TextContext, TextGenerationResponse] = FakePipeline()
