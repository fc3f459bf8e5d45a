"""Grammars, compiled in a thread beside the model and kept for the requests to come."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from penstock.errors import (
    InputError,
    MissingDependencyError,
    PenstockError,
    UnavailableError,
    UnsupportedFeatureError,
)
from penstock.pipelines.config.structured_output import StructuredOutputConfig
from penstock.pipelines.core import Grammar, TextContext
from penstock.pipelines.grammars import grammar_source
from penstock.pipelines.structured_output.vocabulary import token_bytes
from penstock.pipelines.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import xgrammar as xgr

_NICENESS = 5  # low, but not so low that a model on all cores starves it
_TURN = 1.0  # seconds that a grammar keeps the others waiting
_MOST_THREADS = 3  # those beyond their time, which nothing can stop, counted; each holds a core and memory


class GrammarCompiler:
    """Makes the matchers of contexts with a grammar; never in the way of the thread that runs the model.

    Low-priority threads compile, one grammar after the other as long as each is quick: a slow one goes on
    beside the next, so that a large schema does not hold up small ones. One that is not done in time is
    refused, and its thread, which nothing can stop, is left to itself. Compiled grammars, and refusals, are
    kept, the last used ones longest.

    All methods are called by one thread, the one that runs the model.

    Args:
        tokenizer: says which bytes a token stands for, and which ends an output.
        vocab_size: number of logits of the model, which may be more than the tokenizer has tokens.
        config: the limits.
    """

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, *, config: StructuredOutputConfig | None = None
    ) -> None:
        self.config = config if config is not None else StructuredOutputConfig()
        self._vocabulary = _Vocabulary(tokenizer, vocab_size, self.config.whitespace == "compact")
        self._kept: OrderedDict[Grammar, xgr.CompiledGrammar | PenstockError] = OrderedDict()
        self._kept_bytes = 0
        self._waiting: OrderedDict[Grammar, None] = OrderedDict()
        self._jobs: list[_Job] = []  # in time
        self._stuck: list[_Job] = []  # beyond it

    @property
    def is_available(self) -> bool:
        """Whether xgrammar is installed."""
        return find_spec("xgrammar") is not None

    def ready(self, context: TextContext) -> bool:
        """Whether the context may run: it has no grammar, or its matcher, which this call gives it.

        The first call begins the compilation; call again until it is True. The matcher of a context that
        comes with generated tokens stands behind them.

        Raises:
            UnsupportedSchemaError: a JSON schema uses a keyword that cannot be honoured.
            InputError: the grammar is wrong, too large, took too long, or does not go with the context.
            UnavailableError: too many grammars are taking too long.
            MissingDependencyError: xgrammar is not installed.
        """
        if context.grammar is None or context.matcher is not None:
            return True
        ends = self._ends_of(context)
        compiled = self._compiled(context.grammar)
        if compiled is None:
            return False
        context.set_matcher(_new_matcher(compiled, ends, context))
        return True

    def close(self) -> None:
        """Begins nothing any more and drops what was kept; a grammar that is being compiled ends unseen."""
        self._waiting.clear()
        self._kept.clear()
        self._kept_bytes = 0

    @property
    def num_kept_bytes(self) -> int:
        """Memory of the compiled grammars that are kept."""
        return self._kept_bytes

    def _ends_of(self, context: TextContext) -> list[int]:
        ends = context.eos_token_ids
        if not ends and not context.ignore_eos:
            ends = self._vocabulary.tokenizer.eos_token_ids
        if not ends:
            reason = (
                "an output ends where its grammar does: leave ignore_eos out, or give stop_token_ids"
                if context.ignore_eos
                else "the tokenizer names no token that ends an output: give stop_token_ids"
            )
            raise UnsupportedFeatureError("a grammar without a token that ends the output", reason)
        return sorted(ends)

    def _compiled(self, grammar: Grammar) -> xgr.CompiledGrammar | None:
        """The compiled grammar; None while it is being made."""
        if not self.is_available:
            raise MissingDependencyError("xgrammar", "grammar", "structured output")
        size = len(grammar.text)
        if size > self.config.max_size:
            raise InputError(
                f"the grammar has {size} characters, more than the {self.config.max_size} that are allowed: "
                "make it smaller, or raise --max-grammar-size"
            )
        self._look_at_jobs()
        kept = self._kept.get(grammar)
        if kept is not None:
            self._kept.move_to_end(grammar)
            if isinstance(kept, PenstockError):
                raise kept.with_traceback(None)
            return kept
        if all(job.grammar != grammar for job in self._jobs):
            self._waiting.setdefault(grammar)
        self._begin_next()
        return None

    def _look_at_jobs(self) -> None:
        self._stuck = [job for job in self._stuck if not job.is_done.is_set()]
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            if job.is_done.is_set():
                assert job.result is not None
                self._keep(job.grammar, job.result)
            elif job.seconds > self.config.compile_timeout:
                self._stuck.append(job)
                self._keep(
                    job.grammar,
                    InputError(
                        f"the grammar was not compiled within {self.config.compile_timeout:g} s: make it "
                        "smaller or less nested, or raise --grammar-compile-timeout"
                    ),
                )
            else:
                self._jobs.append(job)
        self._begin_next()

    def _begin_next(self) -> None:
        if not self._waiting or any(job.seconds <= _TURN for job in self._jobs):
            return
        if len(self._stuck) >= _MOST_THREADS:
            self._waiting.clear()  # whose contexts come back for the error
            raise UnavailableError(
                f"{len(self._stuck)} grammars are still being compiled beyond their time: try again later",
                retry_after=30,
            )
        if len(self._jobs) + len(self._stuck) < _MOST_THREADS:
            grammar, _ = self._waiting.popitem(last=False)
            self._jobs.append(job := _Job(grammar, self._vocabulary))
            threading.Thread(target=job.run, name="penstock-grammar", daemon=True).start()

    def _keep(self, grammar: Grammar, result: xgr.CompiledGrammar | PenstockError) -> None:
        self._kept[grammar] = result
        self._kept_bytes += _num_bytes(grammar, result)
        while self._kept_bytes > self.config.cache_size and len(self._kept) > 1:
            self._kept_bytes -= _num_bytes(*self._kept.popitem(last=False))


class _Vocabulary:
    """What xgrammar has to know of the tokenizer: made by the first compilation, in its thread."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, is_compact: bool) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.is_compact = is_compact

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text."""
        token_id = self.tokenizer.backend.token_to_id(token)
        return token_id if token_id is not None and token_id < self.vocab_size else None

    @cached_property
    def compiler(self) -> xgr.GrammarCompiler:
        import xgrammar as xgr

        tokens = token_bytes(self.tokenizer.backend, self.vocab_size)
        ends = sorted(self.tokenizer.eos_token_ids)  # each matcher brings its own
        info = xgr.TokenizerInfo(tokens, xgr.VocabType.RAW, vocab_size=self.vocab_size, stop_token_ids=ends)
        # Few threads: the cores belong to the model. No cache: ours has a bound and counts refusals too.
        threads = max((os.cpu_count() or 1) // 4, 1)
        return xgr.GrammarCompiler(info, max_threads=threads, cache_enabled=False)


@dataclass(slots=True)
class _Job:
    """One compilation."""

    grammar: Grammar
    vocabulary: _Vocabulary
    started: float | None = None  # not before the tokenizer is there, which is no fault of the grammar
    result: xgr.CompiledGrammar | PenstockError | None = None
    is_done: threading.Event = field(default_factory=threading.Event)

    @property
    def seconds(self) -> float:
        """How long the grammar has had."""
        return 0.0 if self.started is None else time.monotonic() - self.started

    def run(self) -> None:
        _lower_priority()
        try:
            assert self.vocabulary.compiler  # made outside of the time that the grammar has
            self.started = time.monotonic()
            self.result = _compile(self.vocabulary, self.grammar)
        except PenstockError as error:
            self.result = error
        except RecursionError:
            self.result = InputError("the grammar is nested too deeply: make it flatter")
        except Exception as error:  # xgrammar says RuntimeError, tvm's errors and ValueError alike
            self.result = InputError(f"the {self.grammar.kind} grammar is not valid: {_plain(error)}")
        self.is_done.set()


def _compile(vocabulary: _Vocabulary, grammar: Grammar) -> xgr.CompiledGrammar:
    source = grammar_source(grammar, compact=vocabulary.is_compact, token_id=vocabulary.token_id)
    if source.notation == "structural_tag":
        compiled = vocabulary.compiler.compile_structural_tag(source.text)
    else:
        compiled = vocabulary.compiler.compile_grammar(source.text)
    _check_start(compiled, vocabulary.vocab_size)
    return compiled


def _check_start(compiled: xgr.CompiledGrammar, vocab_size: int) -> None:
    import xgrammar as xgr

    mask = torch.empty((1, -(-vocab_size // 32)), dtype=torch.int32)
    xgr.GrammarMatcher(compiled).fill_next_token_bitmask(mask)
    if not mask.any():
        raise InputError("the grammar allows no output at all: no token can begin one")


def _new_matcher(compiled: xgr.CompiledGrammar, ends: list[int], context: TextContext) -> xgr.GrammarMatcher:
    import xgrammar as xgr

    matcher = xgr.GrammarMatcher(compiled, override_stop_tokens=ends)
    for place, token in enumerate(context.generated_tokens.tolist()):
        if not matcher.accept_token(token):
            raise InputError(
                f"the grammar does not accept token {token}, number {place} of those that request "
                f"{context.request_id} comes with"
            )
    return matcher


def _num_bytes(grammar: Grammar, result: xgr.CompiledGrammar | PenstockError) -> int:
    size = 1024 + 4 * len(grammar.text)
    return size if isinstance(result, PenstockError) else size + int(result.memory_size_bytes)


def _plain(error: Exception) -> str:
    """The library's message without its time stamp, source line and anything after the first line."""
    text = str(error).strip() or type(error).__name__
    line = text.splitlines()[0].rpartition("] ")[2]
    return line.partition(": ")[2] if line.startswith("/") else line


def _lower_priority() -> None:
    """Of this thread alone: on Linux a thread's id stands for a process here. Elsewhere it stays as it is."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
