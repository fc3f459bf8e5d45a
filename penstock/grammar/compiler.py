"""Grammars, compiled in a thread beside the model and kept for the requests to come."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Protocol

from penstock.config.structured_output import StructuredOutputConfig
from penstock.errors import (
    InputError,
    MissingDependencyError,
    PenstockError,
    UnavailableError,
    UnsupportedFeatureError,
)
from penstock.grammar.llguidance_backend import LLGuidanceBackend
from penstock.grammar.xgrammar_backend import XGrammarBackend
from penstock.pipelines.core import Grammar, GrammarMatcher, TextContext
from penstock.text.tokenizer import TextTokenizer

_logger = logging.getLogger(__name__)

_EXTRAS = {"llguidance": "grammar", "xgrammar": "xgrammar"}
_NICENESS = 5  # low, but not so low that a model on all cores starves it
_SWITCH_INTERVAL = 0.0005  # seconds
_TURN = 1.0  # seconds that a grammar keeps the others waiting
_MAX_THREADS = 4  # those of refused grammars counted: each holds a core and memory
_STACK_SIZE = 64 << 20  # llguidance recurses over rules that refer to rules (`grammars.lark.writer`)


class CompiledGrammar(Protocol):
    """A compiled grammar."""

    num_bytes: int
    is_usable: bool  # False where it must be compiled again

    def new_matcher(self, ends: Sequence[int]) -> GrammarMatcher:
        """A matcher at the beginning; ``ends`` are the tokens that end an output."""


class GrammarBackend(Protocol):
    """A library that compiles grammars for one tokenizer."""

    library: str

    def prepare(self) -> None:
        """Reads the tokenizer."""

    def compile(self, grammar: Grammar, check_time: Callable[[], None]) -> CompiledGrammar:
        """The compiled grammar; ``check_time`` raises when it has taken too long."""


_BACKENDS: dict[str, Callable[[TextTokenizer, int, StructuredOutputConfig], GrammarBackend]] = {
    "llguidance": LLGuidanceBackend,
    "xgrammar": XGrammarBackend,
}


class GrammarCompiler:
    """Makes the matchers of contexts with a grammar, in threads beside the one that runs the model.

    Low-priority threads compile one grammar after the other as long as each is quick. A slow one goes on
    beside the next, so that a large schema does not delay small ones. One that is not done in time is
    refused; others wait until one of the threads is free. Compiled grammars and refusals are kept within
    ``grammar_cache_size`` bytes, the last used ones longest.

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
        self._tokenizer = tokenizer
        self._backend = _BACKENDS[self.config.backend](tokenizer, vocab_size, self.config)
        self._kept: OrderedDict[Grammar, CompiledGrammar | PenstockError] = OrderedDict()
        self._kept_bytes = 0
        self._waiting: OrderedDict[Grammar, float] = OrderedDict()  # since when
        self._jobs: list[_Job] = []  # in time
        self._stuck: list[_Job] = []  # beyond it

    @property
    def is_available(self) -> bool:
        """Whether the library that compiles grammars is installed."""
        return find_spec(self._backend.library) is not None

    def ready(self, context: TextContext) -> bool:
        """Whether the context may run: it has no grammar, or its matcher, which this call gives it.

        The first call begins the compilation; call again until it is True. The matcher of a context that
        comes with generated tokens stands behind them.

        Raises:
            UnsupportedSchemaError: a JSON schema uses a keyword that cannot be honoured.
            InputError: the grammar is wrong, too large, took too long, or does not go with the context.
            UnavailableError: too many grammars are taking too long.
            MissingDependencyError: the library that compiles grammars is not installed.
        """
        if context.grammar is None or context.matcher is not None:
            return True
        ends = self._ends_of(context)
        compiled = self._compiled(context.grammar)
        if compiled is None:
            return False
        context.set_matcher(_matcher_behind(compiled, ends, context))
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
            ends = self._tokenizer.eos_token_ids
        if not ends:
            reason = (
                "an output ends where its grammar does: leave ignore_eos out, or give stop_token_ids"
                if context.ignore_eos
                else "the tokenizer names no token that ends an output: give stop_token_ids"
            )
            raise UnsupportedFeatureError("a grammar without a token that ends the output", reason)
        return sorted(ends)

    def _compiled(self, grammar: Grammar) -> CompiledGrammar | None:
        """The compiled grammar; None while it is being made."""
        if not self.is_available:
            raise MissingDependencyError(
                self._backend.library, _EXTRAS[self.config.backend], "structured output"
            )
        size = len(grammar.text)
        if size > self.config.max_size:
            raise InputError(
                f"the grammar has {size} characters, more than the {self.config.max_size} that are allowed: "
                "make it smaller, or raise --max-grammar-size"
            )
        self._look_at_jobs()
        kept = self._kept.get(grammar)
        if kept is not None and not isinstance(kept, PenstockError) and not kept.is_usable:
            self._kept_bytes -= _num_bytes(grammar, self._kept.pop(grammar))
            kept = None
        if kept is not None:
            self._kept.move_to_end(grammar)
            if isinstance(kept, PenstockError):
                raise kept.with_traceback(None)
            return kept
        if all(job.grammar != grammar for job in self._jobs):
            since = self._waiting.setdefault(grammar, time.monotonic())
            self._begin_next()
            is_full = len(self._jobs) + len(self._stuck) >= _MAX_THREADS
            if (
                grammar in self._waiting
                and is_full
                and time.monotonic() - since > self.config.compile_timeout
            ):
                del self._waiting[grammar]
                raise UnavailableError(
                    f"{len(self._jobs) + len(self._stuck)} other grammars are being compiled since more than "
                    f"{self.config.compile_timeout:g} s: try again later",
                    retry_after=30,
                )
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
                self._keep(job.grammar, _too_slow(job.grammar, self.config.compile_timeout))
            else:
                self._jobs.append(job)
        self._begin_next()

    def _begin_next(self) -> None:
        if not self._waiting or any(job.seconds <= _TURN for job in self._jobs):
            return
        if len(self._jobs) + len(self._stuck) < _MAX_THREADS:
            grammar, _ = self._waiting.popitem(last=False)
            self._jobs.append(job := _Job(grammar, self._backend, self.config.compile_timeout))
            _start_thread(job.run)

    def _keep(self, grammar: Grammar, result: CompiledGrammar | PenstockError) -> None:
        self._kept[grammar] = result
        self._kept_bytes += _num_bytes(grammar, result)
        while self._kept_bytes > self.config.cache_size and len(self._kept) > 1:
            self._kept_bytes -= _num_bytes(*self._kept.popitem(last=False))


@dataclass(slots=True)
class _Job:
    """One compilation."""

    grammar: Grammar
    backend: GrammarBackend
    max_seconds: float
    started: float | None = None  # not before the tokenizer is there, which is no fault of the grammar
    result: CompiledGrammar | PenstockError | None = None
    is_done: threading.Event = field(default_factory=threading.Event)

    @property
    def seconds(self) -> float:
        """How long the grammar has had."""
        return 0.0 if self.started is None else time.monotonic() - self.started

    def check_time(self) -> None:
        """Raises when the grammar has had its time."""
        if self.seconds > self.max_seconds:
            raise _too_slow(self.grammar, self.max_seconds)

    def run(self) -> None:
        """Compiles the grammar and sets the result."""
        _lower_priority()
        with _QuickSwitches():
            self._compile()
        self.is_done.set()

    def _compile(self) -> None:
        try:
            self.backend.prepare()  # outside of the time that the grammar has
            self.started = time.monotonic()
            self.result = self.backend.compile(self.grammar, self.check_time)
        except PenstockError as error:
            self.result = error
        except RecursionError:
            self.result = InputError("the grammar is nested too deeply: make it flatter")
        except Exception as error:
            _logger.exception("a %s grammar could not be compiled", self.grammar.kind)
            self.result = InputError(
                f"the {self.grammar.kind} grammar could not be compiled ({type(error).__name__})"
            )


def _matcher_behind(compiled: CompiledGrammar, ends: list[int], context: TextContext) -> GrammarMatcher:
    """A matcher that has accepted the context's generated tokens."""
    matcher = compiled.new_matcher(ends)
    for place, token in enumerate(context.generated_tokens.tolist()):
        if not matcher.accept_token(token):
            raise InputError(
                f"the grammar does not accept token {token}, number {place} of those that request "
                f"{context.request_id} comes with"
            )
    return matcher


def _num_bytes(grammar: Grammar, result: CompiledGrammar | PenstockError) -> int:
    size = 1024 + 4 * len(grammar.text)
    return size if isinstance(result, PenstockError) else size + result.num_bytes


class _QuickSwitches:
    """While Python code compiles a grammar, other threads get the interpreter lock within half a millisecond.

    A step of the model takes the lock many times. With the usual 5 ms each time it would be slow.
    """

    _lock = threading.Lock()
    _num_inside = 0
    _before = 0.0

    def __enter__(self) -> None:
        with _QuickSwitches._lock:
            if _QuickSwitches._num_inside == 0:
                _QuickSwitches._before = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_INTERVAL, _QuickSwitches._before))
            _QuickSwitches._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with _QuickSwitches._lock:
            _QuickSwitches._num_inside -= 1
            if _QuickSwitches._num_inside == 0:
                sys.setswitchinterval(_QuickSwitches._before)


def _too_slow(grammar: Grammar, seconds: float) -> InputError:
    text = grammar.text if len(grammar.text) <= 80 else f"{grammar.text[:80]}..."
    return InputError(
        f"the {grammar.kind} grammar {text!r} was not compiled within {seconds:g} s: make it smaller or less "
        "nested, or raise --grammar-compile-timeout"
    )


def _start_thread(run: Callable[[], None]) -> None:
    """Starts a thread with a large stack, of which only what is used takes memory."""
    before = threading.stack_size(_STACK_SIZE)
    try:
        threading.Thread(target=run, name="penstock-grammar", daemon=True).start()
    finally:
        threading.stack_size(before)


def _lower_priority() -> None:
    """Of this thread alone: on Linux a thread's id stands for a process here. Elsewhere it stays as it is."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
