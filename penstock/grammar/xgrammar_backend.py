"""Compiles and matches grammars with xgrammar, which limits neither memory nor the time to compute a mask."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from penstock.config.structured_output import StructuredOutputConfig
from penstock.errors import InputError, PenstockError
from penstock.grammar.schema import grammar_source
from penstock.grammar.vocabulary import token_bytes
from penstock.pipelines.core import Grammar, GrammarMatcher
from penstock.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import xgrammar as xgr


class XGrammarBackend:
    """Compiles grammars for one tokenizer. Takes the arguments of `LLGuidanceBackend`."""

    library = "xgrammar"

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, config: StructuredOutputConfig) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._config = config

    def prepare(self) -> None:
        """Read the tokenizer. The first call takes 1 to 2 seconds for a large vocabulary."""
        assert self._compiler

    def compile(self, grammar: Grammar, check_time: Callable[[], None]) -> CompiledXGrammar:
        """Return the compiled grammar.

        Raises:
            PenstockError: the grammar is not valid, allows no output, or ``check_time`` raises the error.
        """
        source = grammar_source(
            grammar, compact=self._config.whitespace == "compact", token_id=self._token_id
        )
        check_time()
        try:
            if source.notation == "structural_tag":
                compiled = self._compiler.compile_structural_tag(source.text)
            else:
                compiled = self._compiler.compile_grammar(source.text)
        except PenstockError:
            raise
        except Exception as error:  # xgrammar raises RuntimeError, ValueError and errors of tvm
            raise InputError(f"the {grammar.kind} grammar is not valid: {_readable_error(error)}") from None
        self._check_start(compiled)
        return CompiledXGrammar(compiled)

    def _check_start(self, compiled: xgr.CompiledGrammar) -> None:
        import xgrammar as xgr

        mask = torch.empty((1, -(-self._vocab_size // 32)), dtype=torch.int32)
        xgr.GrammarMatcher(compiled).fill_next_token_bitmask(mask)
        if not mask.any():
            raise InputError("the grammar allows no output: it allows no first token")

    def _token_id(self, token: str) -> int | None:
        token_id = self._tokenizer.backend.token_to_id(token)
        return token_id if token_id is not None and token_id < self._vocab_size else None

    @cached_property
    def _compiler(self) -> xgr.GrammarCompiler:
        import xgrammar as xgr

        tokens = token_bytes(self._tokenizer.backend, self._vocab_size)
        stop_token_ids = sorted(self._tokenizer.eos_token_ids)  # defaults, which each matcher overrides
        info = xgr.TokenizerInfo(
            tokens, xgr.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=stop_token_ids
        )
        # Few threads, so that the model has enough cores. No cache, because Penstock's compiler has one.
        num_threads = max((os.cpu_count() or 1) // 4, 1)
        return xgr.GrammarCompiler(info, max_threads=num_threads, cache_enabled=False)


class CompiledXGrammar:
    """A compiled grammar."""

    is_usable = True

    def __init__(self, compiled: xgr.CompiledGrammar) -> None:
        self.num_bytes = int(compiled.memory_size_bytes)
        self._compiled = compiled

    def new_matcher(self, stop_token_ids: Sequence[int]) -> GrammarMatcher:
        """Return a matcher in its initial state. ``stop_token_ids`` are the tokens that end an output."""
        import xgrammar as xgr

        matcher: GrammarMatcher = xgr.GrammarMatcher(
            self._compiled, override_stop_tokens=list(stop_token_ids)
        )
        return matcher


def _readable_error(error: Exception) -> str:
    """Return the first line of xgrammar's error message, without time stamp and source position."""
    text = str(error).strip() or type(error).__name__
    line = text.splitlines()[0].rpartition("] ")[2]
    return line.partition(": ")[2] if line.startswith("/") else line
