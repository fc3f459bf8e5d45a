"""Compiles and matches grammars with llguidance. Limits memory and the time to compute a mask."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from penstock.config.structured_output import StructuredOutputConfig
from penstock.errors import InputError
from penstock.grammar.lark import lark_text, read_ebnf, read_structural_tag
from penstock.grammar.schema import GrammarSource, grammar_source
from penstock.grammar.vocabulary import NO_TEXT, token_bytes
from penstock.pipelines.core import Grammar
from penstock.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import llguidance
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_BYTES_PER_GRAMMAR = 160 << 10  # measured size of a small grammar's lexer tables
_BYTES_PER_CHARACTER = 24  # measured with schemas of 1 to 1,000 properties
_MAX_THREADS = 4  # maximum threads of the pool that computes masks


class LLGuidanceBackend:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: provides the bytes of each token.
        vocab_size: number of logits of the model, which may exceed the number of tokens of the tokenizer.
        config: the limits, and the whitespace that JSON may contain.
    """

    library = "llguidance"

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, config: StructuredOutputConfig) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._config = config

    def prepare(self) -> None:
        """Read the tokenizer. The first call takes 1 to 2 seconds for a large vocabulary."""
        assert self._ll_tokenizer

    def compile(self, grammar: Grammar, check_time: Callable[[], None]) -> CompiledLLGuidance:
        """Compile a grammar.

        Raises:
            PenstockError: the grammar is invalid, allows no output or exceeds a limit, or ``check_time``
                raised the error.
        """
        from llguidance import LLMatcher

        source = grammar_source(
            grammar, compact=self._config.whitespace == "compact", token_id=self._token_id
        )
        check_time()
        text = self._lark_text(source, check_time)
        # no_forcing disables llguidance's search for forced text, whose length has no limit.
        grammar_json = LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + text)
        matcher = LLMatcher(self._ll_tokenizer, grammar_json, log_level=0, limits=self._limits)
        check_time()
        if matcher.is_error():
            raise limit_error(grammar, matcher.get_error())
        compiled = CompiledLLGuidance(grammar, matcher, self, len(text))
        initial_matcher = compiled.new_matcher([])
        mask = torch.zeros((1, -(-self.vocab_size // 32)), dtype=torch.int32)
        initial_matcher.fill_next_token_bitmask(mask)
        if initial_matcher.failure is not None:
            raise initial_matcher.failure
        if not mask.any() and not initial_matcher.is_completed():
            raise InputError("the grammar allows no output: it allows no first token")
        return compiled

    def _lark_text(self, source: GrammarSource, check_time: Callable[[], None]) -> str:
        read_grammar = read_structural_tag if source.notation == "structural_tag" else read_ebnf
        return lark_text(read_grammar(source.text), check_time=check_time)

    def _token_id(self, token: str) -> int | None:
        token_id = self._tokenizer.backend.token_to_id(token)
        return token_id if token_id is not None and token_id < self.vocab_size else None

    @cached_property
    def executor(self) -> LLExecutor:
        """The thread pool that computes the masks of several rows."""

        from llguidance import LLExecutor

        return LLExecutor(min(os.cpu_count() or 1, _MAX_THREADS))

    @cached_property
    def _limits(self) -> llguidance._lib.LLParserLimits:
        from llguidance._lib import LLParserLimits

        return LLParserLimits(
            max_grammar_size=self._config.max_symbols,
            step_lexer_fuel=self._config.mask_fuel,
            step_max_items=self._config.mask_items,
            max_lexer_states=self._config.max_states,
            verbose_errors=False,
        )

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_TokenizerAdapter(self._tokenizer, self.tokens)))

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of each token id."""
        return token_bytes(self._tokenizer.backend, self.vocab_size)


class _TokenizerAdapter:
    """Adapts a tokenizer to llguidance.

    Each context has its own end-of-sequence tokens, but llguidance supports only one end-of-sequence token.
    The end-of-sequence token for llguidance is therefore an additional token id after the vocabulary.
    `LLGuidanceMatcher` handles the end-of-sequence tokens of the context.
    """

    def __init__(self, tokenizer: TextTokenizer, tokens: list[bytes]) -> None:
        self._backend = tokenizer.backend
        self.tokens = [*tokens, NO_TEXT + b"<end>"]
        self.eos_token_id = len(tokens)
        self.bos_token_id = None
        self.special_token_ids = [
            token_id for token_id, token in enumerate(self.tokens) if token.startswith(NO_TEXT)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return list(self._backend.encode(text, add_special_tokens=False).ids)


class CompiledLLGuidance:
    """A compiled grammar. Its matchers share lexer tables, which llguidance computes lazily.

    Attributes:
        num_bytes: estimated memory in bytes.
        is_usable: False once a matcher has exceeded a limit. The grammar must then be compiled again, because
            its matchers share one count of lexer states.
    """

    def __init__(
        self, grammar: Grammar, matcher: LLMatcher, backend: LLGuidanceBackend, num_characters: int
    ) -> None:
        self.grammar = grammar
        self.vocab_size = backend.vocab_size
        self.num_bytes = _BYTES_PER_GRAMMAR + _BYTES_PER_CHARACTER * num_characters
        self.is_usable = True
        self._backend = backend
        self._matcher = matcher

    @property
    def executor(self) -> LLExecutor:
        """The thread pool that computes the masks of several rows."""
        return self._backend.executor

    def token_text(self, token: int) -> str:
        """Return the text of a token. Incomplete characters become U+FFFD."""
        return self._backend.tokens[token].decode(errors="replace")

    def new_matcher(self, stop_token_ids: Sequence[int]) -> LLGuidanceMatcher:
        """Return a matcher in its initial state. ``stop_token_ids`` are the tokens that end an output."""
        return LLGuidanceMatcher(self, self._matcher.deep_copy(), stop_token_ids)


class LLGuidanceMatcher:
    """Implements `penstock.pipelines.core.GrammarMatcher` with llguidance.

    Attributes:
        failure: the error of an exceeded limit, else None. After a failure the matcher allows every token, so
            that the masks of the other contexts can be computed, and `accept_token` raises the error.
    """

    def __init__(
        self, compiled: CompiledLLGuidance, matcher: LLMatcher, stop_token_ids: Sequence[int]
    ) -> None:
        self.failure: InputError | None = None
        self._compiled = compiled
        self._matcher = matcher
        self._stop_token_ids = list(stop_token_ids)
        self._is_terminated = False
        self._cached_row: np.ndarray | None = None  # [ceil(V / 32)] uint32: cached mask of the next tokens

    @property
    def stop_token_ids(self) -> list[int]:
        """The ids of the tokens that end an output."""
        return self._stop_token_ids

    def accept_token(self, token: int) -> bool:
        """Advance by a token and return True.

        Returns False and changes nothing if the token is not allowed or the output has ended.

        Raises:
            InputError: a limit was exceeded.
        """
        if self.failure is not None:
            raise self.failure
        if self._is_terminated or not 0 <= token < self._compiled.vocab_size:
            return False
        if token in self._stop_token_ids:
            self._is_terminated = self._matcher.is_accepting()
            return self._is_terminated
        if self._matcher.try_consume_tokens([token]) == 1:
            self._cached_row = None
            return True
        self._check_failure()
        if (
            self.failure is None
            and self._cached_row is not None
            and self._cached_row[token >> 5] >> (token & 31) & 1
        ):
            # llguidance rejected a token that its mask allows, so the shared lexer has exceeded a limit.
            self._set_failure("the lexer exceeded a limit")
        if self.failure is not None:
            raise self.failure
        return False

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` tokens."""
        if num_tokens and self._is_terminated:
            self._is_terminated = False
            num_tokens -= 1
        if num_tokens:
            self._cached_row = None
            self._matcher.rollback(num_tokens)
            self._check_failure()

    def reset(self) -> None:
        """Return to the initial state. `failure` does not change."""
        self._is_terminated = False
        self._cached_row = None
        self._matcher.reset()

    def is_terminated(self) -> bool:
        """Return whether the matcher has accepted a stop token."""
        return self._is_terminated

    def is_completed(self) -> bool:
        """Return whether the output can end here or has ended."""
        return self._is_terminated or self._matcher.is_accepting()

    def find_jump_forward_string(self) -> str:
        """Return the text of the next token if only one is allowed, else ""."""
        fill_bitmasks([(self, 0)], torch.empty((1, -(-self._compiled.vocab_size // 32)), dtype=torch.int32))
        assert self._cached_row is not None
        token = single_allowed_token(self._cached_row)
        return "" if token is None else self._compiled.token_text(token)

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0) -> None:
        """Write the allowed next tokens to a row of ``bitmask``, ``[R, ceil(V / 32)]`` int32."""
        fill_bitmasks([(self, index)], bitmask)

    def _check_failure(self) -> None:
        if self.failure is None and self._matcher.is_error():
            self._set_failure(self._matcher.get_error())

    def _set_failure(self, reason: str) -> None:
        self._cached_row = None
        self._compiled.is_usable = False
        self.failure = limit_error(self._compiled.grammar, reason)

    def _cache_row_with_stop_tokens(self, row: np.ndarray, num_words: int) -> None:
        """Correct the bits of tokens that end the output in a row that llguidance computed. Cache the row.

        The bit of llguidance's end-of-sequence token is cleared. The bits of the context's stop tokens are
        set if the output can end here, else cleared. After a failure, the cached row allows all tokens.
        """
        self._check_failure()
        if self.failure is not None:
            self._cached_row = np.full(num_words, 0xFFFFFFFF, dtype=np.uint32)
            return
        words = row.view(np.uint32)
        extra_eos_token_id = self._compiled.vocab_size
        words[extra_eos_token_id >> 5] &= np.uint32(~(1 << (extra_eos_token_id & 31)) & 0xFFFFFFFF)
        may_end = bool(self._stop_token_ids) and self._matcher.is_accepting()
        for token_id in self._stop_token_ids:
            bit = np.uint32(1 << (token_id & 31))
            words[token_id >> 5] = words[token_id >> 5] | bit if may_end else words[token_id >> 5] & ~bit
        self._cached_row = words[:num_words]


def fill_bitmasks(rows: Sequence[tuple[LLGuidanceMatcher, int]], bitmask: Tensor) -> None:
    """Write the masks of several matchers into ``bitmask``. Threads of llguidance compute uncached masks.

    Args:
        rows: pairs (matcher, index of the row).
        bitmask: ``[R, ceil(V / 32)]`` int32.
    """
    words = bitmask.numpy().view(np.uint32)
    uncached_matchers = [matcher for matcher, _ in rows if matcher._cached_row is None]
    if uncached_matchers:
        # A row has V + 1 bits, because llguidance has an additional end-of-sequence token.
        words_per_row = (uncached_matchers[0]._compiled.vocab_size + 32) // 32
        computed_rows = np.zeros((len(uncached_matchers), words_per_row), dtype=np.int32)
        if len(uncached_matchers) == 1:
            uncached_matchers[0]._matcher.unsafe_compute_mask_ptr(
                computed_rows.ctypes.data, computed_rows.nbytes
            )
        else:
            pairs = [(matcher._matcher, index) for index, matcher in enumerate(uncached_matchers)]
            executor = uncached_matchers[0]._compiled.executor
            executor.unsafe_compute_mask_ptr(
                pairs, computed_rows.ctypes.data, 4 * words_per_row, len(uncached_matchers)
            )
        for row, matcher in zip(computed_rows, uncached_matchers, strict=True):
            matcher._cache_row_with_stop_tokens(row, words.shape[1])
    for matcher, index in rows:
        assert matcher._cached_row is not None
        words[index] = matcher._cached_row


def single_allowed_token(words: np.ndarray) -> int | None:
    """Return the token id of a row ``[ceil(V / 32)]`` that allows one token; None for several or none."""
    nonzero_words = np.flatnonzero(words)
    if len(nonzero_words) != 1:
        return None
    word = int(words[nonzero_words[0]])
    return None if word & (word - 1) else int(nonzero_words[0]) * 32 + word.bit_length() - 1


def limit_error(grammar: Grammar, message: str) -> InputError:
    """Return the error for a grammar that llguidance rejects, usually because it exceeds a limit."""
    text = grammar.text if len(grammar.text) <= 80 else f"{grammar.text[:80]}..."
    reason = message.strip().splitlines()[0] if message.strip() else "no reason given"
    return InputError(
        f"the {grammar.kind} grammar {text!r} is too complex ({reason}): make it smaller or its repetitions "
        "shorter, or raise --grammar-mask-fuel, --grammar-mask-items or --max-grammar-states"
    )
