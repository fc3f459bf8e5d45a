"""Compiles grammars in background threads and caches the results."""

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

_EXTRAS = {"llguidance": "grammar", "xgrammar": "xgrammar"}  # backend -> extra of the penstock package
_NICENESS = 5  # a low priority, which still gets CPU time while the model uses all cores
_SWITCH_INTERVAL = 0.0005  # seconds between switches of Python threads
_EXCLUSIVE_SECONDS = 1.0  # seconds after which another grammar may compile in parallel
_MAX_THREADS = 4  # includes threads that have exceeded the time limit
_STACK_SIZE = 64 << 20  # bytes; llguidance recurses over chains of rules (see `lark.writer`)


class CompiledGrammar(Protocol):
    """A compiled grammar."""

    num_bytes: int
    is_usable: bool  # False if the grammar must be compiled again

    def new_matcher(self, stop_token_ids: Sequence[int]) -> GrammarMatcher:
        """Return a matcher in its initial state. ``stop_token_ids`` are the tokens that end an output."""


class GrammarBackend(Protocol):
    """Compiles grammars for one tokenizer with an external library."""

    library: str

    def prepare(self) -> None:
        """Read the tokenizer. Called in the thread of each compilation; repeated calls do nothing."""

    def compile(self, grammar: Grammar, check_time: Callable[[], None]) -> CompiledGrammar:
        """Compile a grammar. ``check_time`` raises at the time limit."""


_BACKENDS: dict[str, Callable[[TextTokenizer, int, StructuredOutputConfig], GrammarBackend]] = {
    "llguidance": LLGuidanceBackend,
    "xgrammar": XGrammarBackend,
}


class GrammarCompiler:
    """Creates the grammar matchers of contexts. Grammars are compiled in background threads.

    Low-priority threads compile the grammars one after another. If a grammar takes more than a second, the
    next grammar starts in parallel, so that a large schema does not delay small ones. A grammar that exceeds
    the time limit is rejected, but its thread continues until the compilation ends. If all threads are busy,
    further grammars wait up to the time limit. The cache stores compiled grammars and errors. Above
    ``config.cache_size`` bytes, it evicts the least recently used entries, but keeps at least one.

    All methods must be called from the thread that runs the model.

    Args:
        tokenizer: provides the bytes of each token and the end-of-sequence tokens.
        vocab_size: number of logits of the model, which may exceed the number of tokens of the tokenizer.
        config: the backend, the limits and the cache size. None means the defaults.
    """

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, *, config: StructuredOutputConfig | None = None
    ) -> None:
        self.config = config if config is not None else StructuredOutputConfig()
        self._tokenizer = tokenizer
        self._backend = _BACKENDS[self.config.backend](tokenizer, vocab_size, self.config)
        self._cache: OrderedDict[Grammar, CompiledGrammar | PenstockError] = OrderedDict()
        self._cache_bytes = 0
        # Grammar that has no thread yet -> `time.monotonic()` when `ready` was first called for it.
        self._waiting: OrderedDict[Grammar, float] = OrderedDict()
        self._jobs: list[_Job] = []  # compilations within the time limit
        self._overdue: list[_Job] = []  # compilations that have exceeded the time limit and still run

    @property
    def is_available(self) -> bool:
        """Whether the library that compiles grammars is installed."""
        return find_spec(self._backend.library) is not None

    def ready(self, context: TextContext) -> bool:
        """Return whether the context can be scheduled: it has no grammar, or its matcher is set.

        The first call for a grammar that is not cached starts or queues its compilation, and later calls poll
        it. When the grammar is compiled, this method gives the context a matcher that has accepted the
        context's generated tokens.

        Raises:
            UnsupportedSchemaError: a JSON schema uses an unsupported keyword.
            InputError: the grammar is invalid, too large or too slow to compile, or does not accept the
                generated tokens.
            UnavailableError: no thread was free within the time limit.
            UnsupportedFeatureError: the grammar has an unsupported construct, or the request has no token
                that ends the output.
            MissingDependencyError: the library that compiles grammars is not installed.
        """
        if context.grammar is None or context.matcher is not None:
            return True
        stop_token_ids = self._stop_token_ids(context)
        compiled_grammar = self._cached_or_compiled(context.grammar)
        if compiled_grammar is None:
            return False
        context.set_matcher(_matcher_after_generated_tokens(compiled_grammar, stop_token_ids, context))
        return True

    def close(self) -> None:
        """Drop waiting grammars and clear the cache. Running compilations continue."""
        self._waiting.clear()
        self._cache.clear()
        self._cache_bytes = 0

    @property
    def num_cached_bytes(self) -> int:
        """Estimated bytes of the cached grammars."""
        return self._cache_bytes

    def _stop_token_ids(self, context: TextContext) -> list[int]:
        stop_token_ids = context.eos_token_ids
        if not stop_token_ids and not context.ignore_eos:
            stop_token_ids = self._tokenizer.eos_token_ids
        if not stop_token_ids:
            reason = (
                "no token ends the output with ignore_eos: remove ignore_eos, or set stop_token_ids"
                if context.ignore_eos
                else "the tokenizer has no end-of-sequence token: set stop_token_ids"
            )
            raise UnsupportedFeatureError("a grammar without a token that ends the output", reason)
        return sorted(stop_token_ids)

    def _cached_or_compiled(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return the compiled grammar. If it is not cached, start or queue its compilation and return None.

        Raises the cached error if the compilation has failed.
        """
        if not self.is_available:
            raise MissingDependencyError(
                self._backend.library, _EXTRAS[self.config.backend], "structured output"
            )
        num_characters = len(grammar.text)
        if num_characters > self.config.max_size:
            raise InputError(
                f"the grammar has {num_characters} characters, the maximum is {self.config.max_size}: "
                "make it smaller, or raise --max-grammar-size"
            )
        self._collect_jobs()
        cached_result = self._cache.get(grammar)
        if (
            cached_result is not None
            and not isinstance(cached_result, PenstockError)
            and not cached_result.is_usable
        ):
            self._cache_bytes -= _num_bytes(grammar, self._cache.pop(grammar))
            cached_result = None
        if cached_result is not None:
            self._cache.move_to_end(grammar)
            if isinstance(cached_result, PenstockError):
                raise cached_result.with_traceback(None)
            return cached_result
        if all(job.grammar != grammar for job in self._jobs):
            waiting_since = self._waiting.setdefault(grammar, time.monotonic())
            self._start_next()
            is_full = len(self._jobs) + len(self._overdue) >= _MAX_THREADS
            if (
                grammar in self._waiting
                and is_full
                and time.monotonic() - waiting_since > self.config.compile_timeout
            ):
                del self._waiting[grammar]
                raise UnavailableError(
                    f"the grammar waited more than {self.config.compile_timeout:g} s for one of the "
                    f"{_MAX_THREADS} compilation threads: try again later",
                    retry_after=30,
                )
        return None

    def _collect_jobs(self) -> None:
        self._overdue = [job for job in self._overdue if not job.is_done.is_set()]
        previous_jobs, self._jobs = self._jobs, []
        for job in previous_jobs:
            if job.is_done.is_set():
                assert job.result is not None
                self._store(job.grammar, job.result)
            elif job.compile_seconds > self.config.compile_timeout:
                self._overdue.append(job)
                self._store(job.grammar, _time_limit_error(job.grammar, self.config.compile_timeout))
            else:
                self._jobs.append(job)
        self._start_next()

    def _start_next(self) -> None:
        if not self._waiting or any(job.compile_seconds <= _EXCLUSIVE_SECONDS for job in self._jobs):
            return
        if len(self._jobs) + len(self._overdue) < _MAX_THREADS:
            grammar, _ = self._waiting.popitem(last=False)
            self._jobs.append(job := _Job(grammar, self._backend, self.config.compile_timeout))
            _start_thread(job.run)

    def _store(self, grammar: Grammar, result: CompiledGrammar | PenstockError) -> None:
        self._cache[grammar] = result
        self._cache_bytes += _num_bytes(grammar, result)
        while self._cache_bytes > self.config.cache_size and len(self._cache) > 1:
            self._cache_bytes -= _num_bytes(*self._cache.popitem(last=False))


@dataclass(slots=True)
class _Job:
    """The compilation of one grammar in a thread."""

    grammar: Grammar
    backend: GrammarBackend
    max_seconds: float
    started_at: float | None = None  # None until `backend.prepare` returns
    result: CompiledGrammar | PenstockError | None = None
    is_done: threading.Event = field(default_factory=threading.Event)

    @property
    def compile_seconds(self) -> float:
        """Seconds since the compilation started; 0 before the start."""
        return 0.0 if self.started_at is None else time.monotonic() - self.started_at

    def check_time(self) -> None:
        """Raise `InputError` at the time limit."""
        if self.compile_seconds > self.max_seconds:
            raise _time_limit_error(self.grammar, self.max_seconds)

    def run(self) -> None:
        """Compile the grammar, and set `result` and `is_done`."""
        _lower_priority()
        with _ShortSwitchInterval():
            self._compile()
        self.is_done.set()

    def _compile(self) -> None:
        try:
            self.backend.prepare()  # not part of the compile time
            self.started_at = time.monotonic()
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


def _matcher_after_generated_tokens(
    compiled_grammar: CompiledGrammar, stop_token_ids: list[int], context: TextContext
) -> GrammarMatcher:
    """Return a matcher that has accepted the context's generated tokens.

    Raises:
        InputError: the grammar does not accept the tokens.
    """
    matcher = compiled_grammar.new_matcher(stop_token_ids)
    for index, token in enumerate(context.generated_tokens.tolist()):
        if not matcher.accept_token(token):
            raise InputError(
                f"the grammar does not accept token {token}, generated token {index} of request "
                f"{context.request_id}"
            )
    return matcher


def _num_bytes(grammar: Grammar, result: CompiledGrammar | PenstockError) -> int:
    num_text_bytes = 1024 + 4 * len(grammar.text)
    return num_text_bytes if isinstance(result, PenstockError) else num_text_bytes + result.num_bytes


class _ShortSwitchInterval:
    """Context manager that limits Python's thread switch interval to 0.5 ms while a grammar is compiled.

    A step of the model acquires the GIL many times. Each time it may wait for one switch interval, by default
    5 ms.
    """

    _lock = threading.Lock()
    _num_inside = 0
    _previous_interval = 0.0

    def __enter__(self) -> None:
        with _ShortSwitchInterval._lock:
            if _ShortSwitchInterval._num_inside == 0:
                _ShortSwitchInterval._previous_interval = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_INTERVAL, _ShortSwitchInterval._previous_interval))
            _ShortSwitchInterval._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with _ShortSwitchInterval._lock:
            _ShortSwitchInterval._num_inside -= 1
            if _ShortSwitchInterval._num_inside == 0:
                sys.setswitchinterval(_ShortSwitchInterval._previous_interval)


def _time_limit_error(grammar: Grammar, seconds: float) -> InputError:
    text = grammar.text if len(grammar.text) <= 80 else f"{grammar.text[:80]}..."
    return InputError(
        f"the {grammar.kind} grammar {text!r} was not compiled within {seconds:g} s: make it smaller or less "
        "nested, or raise --grammar-compile-timeout"
    )


def _start_thread(run: Callable[[], None]) -> None:
    """Start a thread with a large stack. The system allocates only the pages that are used."""
    old_size = threading.stack_size(_STACK_SIZE)
    try:
        threading.Thread(target=run, name="penstock-grammar", daemon=True).start()
    finally:
        threading.stack_size(old_size)


def _lower_priority() -> None:
    """Lower the priority of this thread on Linux. On other systems setpriority takes no thread id."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
