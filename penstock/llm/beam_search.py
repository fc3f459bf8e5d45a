"""Beam search with contexts, ``kv.fork`` and log probabilities. Pipelines contain no code for beam search.

At every step, each prompt has up to ``num_beams`` running beams. The model scores all continuations of the
beams by one token, and the search keeps the best continuations. The first continuation of a beam keeps the
context of the beam. Each further continuation gets a forked context, which shares all full blocks. A beam is
finished when one of the ``num_beams`` best continuations ends it. The score of a finished
beam is the sum of its log probabilities divided by ``length ** length_penalty``. Freitag & Al-Onaizan 2017,
arXiv:1702.01806, describe the algorithm. The search ends under the same conditions as in transformers'
``generate``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from uuid import uuid4

import numpy as np

from penstock.errors import InputError, InsufficientBlocksError, UnsupportedFeatureError
from penstock.host.interrupts import deferred_interrupts
from penstock.kv_cache.reservation import claim
from penstock.pipelines.core import Pipeline, TextContext, TextGenerationResponse
from penstock.plain_numbers import checked_integer, checked_number, plain

EarlyStopping: TypeAlias = bool | Literal["never"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamOptions:
    """Parameters of beam search.

    Raises:
        InputError: a value is invalid, or two values contradict each other.
    """

    num_beams: int = 4
    """Number of beams of each prompt."""
    num_return_sequences: int = 1
    """Number of results; at most ``num_beams``."""
    length_penalty: float = 1.0
    """Scores are divided by ``length ** length_penalty``. A positive value favours long texts."""
    early_stopping: EarlyStopping = False
    """When the search of a prompt ends before the maximum length. True: when ``num_beams`` beams have
    finished. False: when ``num_beams`` beams have finished and no running beam has a better score than the
    worst of them. ``"never"``: as False, but if ``length_penalty`` is positive, running beams are scored with
    the maximum length.
    """

    def __post_init__(self) -> None:
        for name in ("num_beams", "num_return_sequences"):
            object.__setattr__(self, name, checked_integer(name, getattr(self, name), minimum=1))
        if self.num_return_sequences > self.num_beams:
            raise InputError(
                f"num_return_sequences is {self.num_return_sequences}, but only {self.num_beams} beams "
                "run: raise num_beams"
            )
        penalty = checked_number("length_penalty", self.length_penalty, -100, 100)
        object.__setattr__(self, "length_penalty", penalty)
        object.__setattr__(self, "early_stopping", plain(self.early_stopping))
        if self.early_stopping not in (True, False, "never"):
            raise InputError(f"early_stopping must be True, False or 'never', was {self.early_stopping!r}")


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam."""

    token_ids: list[int]
    """The generated tokens, including the token that ended the beam."""
    log_probabilities: list[float]
    """The log probability of each token."""
    score: float
    """The sum of ``log_probabilities``, divided by ``length ** length_penalty``."""
    has_end_token: bool
    """Whether an end token ended the beam; False if the maximum length ended it."""


@dataclass(frozen=True, slots=True)
class _Beam:
    context: TextContext
    token_ids: list[int]
    log_probabilities: list[float]
    total_log_probability: float


@dataclass(frozen=True, slots=True)
class _Continuation:
    beam: _Beam
    token: int
    log_probability: float

    @property
    def total_log_probability(self) -> float:
        return self.beam.total_log_probability + self.log_probability


@dataclass(slots=True)
class _PromptSearch:
    """The search of one prompt."""

    caller_context: TextContext  # the context that the caller passed
    prompt_context: TextContext  # the context that computes the prompt
    end_tokens: frozenset[int]
    max_new_tokens: int
    beams: list[_Beam]
    finished: list[Hypothesis] = field(default_factory=list)  # sorted by score, best first
    num_steps: int = 0


def search(
    pipeline: Pipeline[TextContext, TextGenerationResponse],
    contexts: Sequence[TextContext],
    options: BeamOptions,
    max_batch_size: int,
    max_batch_input_tokens: int,
) -> Iterator[tuple[TextContext, list[Hypothesis]]]:
    """Run the search for any number of prompts. The limits and the KV cache determine how many run at once.

    Yields:
        Each context and its ``num_return_sequences`` best hypotheses, best first; none if the context already
        has the maximum length.

    Raises:
        InsufficientBlocksError: the beams of one prompt do not fit the KV cache.
        UnsupportedFeatureError: the pipeline uses speculative decoding.
    """
    remaining_contexts, num_prompts = list(contexts), max(1, max_batch_size // options.num_beams)
    while remaining_contexts:
        batch = remaining_contexts[:num_prompts]
        beams = BeamSearch(
            pipeline,
            batch,
            options,
            max_batch_size=max_batch_size,
            max_batch_input_tokens=max_batch_input_tokens,
        )
        try:
            while not beams.is_done:
                with deferred_interrupts():
                    beams.step()
        except InsufficientBlocksError:
            if len(batch) == 1:
                raise
            num_prompts = len(batch) // 2
            continue
        finally:
            with deferred_interrupts():
                beams.close()
        yield from zip(batch, beams.results(), strict=True)
        del remaining_contexts[:num_prompts]


class BeamSearch:
    """A beam search for several prompts. Call `step` until `is_done`, then `results`. Always call `close`.

    Args:
        pipeline: runs the model; nothing else may use it during the search.
        contexts: prompts without generated tokens. ``eos_token_ids`` and ``max_length`` end a beam. Sampling
            parameters have no effect.
        options: parameters of the search.
        max_batch_size: maximum number of contexts of one step.
        max_batch_input_tokens: maximum number of tokens of one step; longer prompts are cut into chunks.
    """

    def __init__(
        self,
        pipeline: Pipeline[TextContext, TextGenerationResponse],
        contexts: Sequence[TextContext],
        options: BeamOptions,
        *,
        max_batch_size: int,
        max_batch_input_tokens: int,
    ) -> None:
        self._pipeline = pipeline
        self._options = options
        self._max_batch_size = max_batch_size
        self._max_tokens = max_batch_input_tokens
        self._open_contexts: dict[str, TextContext] = {}
        self._prompts = [self._begin(context) for context in contexts]

    @property
    def is_done(self) -> bool:
        """Whether the search of all prompts has ended."""
        return not any(prompt.beams for prompt in self._prompts)

    def results(self) -> list[list[Hypothesis]]:
        """Return the ``num_return_sequences`` best hypotheses of each prompt, best first."""
        return [prompt.finished[: self._options.num_return_sequences] for prompt in self._prompts]

    def step(self) -> None:
        """Generate one more token for every beam.

        Raises:
            InsufficientBlocksError: all beams together do not fit the KV cache.
        """
        running = [prompt for prompt in self._prompts if prompt.beams]
        next_log_probabilities = self._next_log_probabilities(
            [beam.context for prompt in running for beam in prompt.beams]
        )
        for prompt in running:
            continuations = self._choose_continuations(prompt, next_log_probabilities)
            self._assign_contexts(prompt, continuations)

    def close(self) -> None:
        """Release all contexts. Set ``num_cached_tokens`` of the caller's contexts. May be called twice."""
        for prompt in self._prompts:
            prompt.caller_context.num_cached_tokens = prompt.prompt_context.num_cached_tokens
        for context in self._open_contexts.values():
            self._pipeline.release(context)
        self._open_contexts.clear()

    # -- Choice of beams --------------------------------------------------------------------------------

    def _choose_continuations(
        self, prompt: _PromptSearch, next_log_probabilities: Mapping[str, Mapping[int, float]]
    ) -> list[_Continuation]:
        """Return the continuations that keep running. Add ended continuations to the finished beams."""
        options = self._options
        prompt.num_steps += 1
        best_candidates = sorted(
            (
                _Continuation(beam, token, log_probability)
                for beam in prompt.beams
                for token, log_probability in next_log_probabilities[beam.context.request_id].items()
            ),
            key=lambda candidate: -candidate.total_log_probability,
        )[: self._num_candidates(prompt.end_tokens)]
        is_at_limit = prompt.num_steps == prompt.max_new_tokens
        for candidate in best_candidates[: options.num_beams]:
            if is_at_limit or candidate.token in prompt.end_tokens:
                prompt.finished.append(self._hypothesis(prompt, candidate))
        prompt.finished.sort(key=lambda candidate: -candidate.score)
        del prompt.finished[options.num_beams :]
        running = [candidate for candidate in best_candidates if candidate.token not in prompt.end_tokens][
            : options.num_beams
        ]
        return [] if is_at_limit or self._has_ended(prompt, running) else running

    def _num_candidates(self, end_tokens: frozenset[int]) -> int:
        """Return the number of candidates per step: enough that ``num_beams`` of them are no end tokens."""
        return max(2, 1 + len(end_tokens)) * self._options.num_beams

    def _hypothesis(self, prompt: _PromptSearch, continuation: _Continuation) -> Hypothesis:
        return Hypothesis(
            [*continuation.beam.token_ids, continuation.token],
            [*continuation.beam.log_probabilities, continuation.log_probability],
            continuation.total_log_probability / prompt.num_steps**self._options.length_penalty,
            continuation.token in prompt.end_tokens,
        )

    def _has_ended(self, prompt: _PromptSearch, running: Sequence[_Continuation]) -> bool:
        """Return whether the search of a prompt ends."""
        if not running:
            return True  # every candidate ends with an end token
        if len(prompt.finished) < self._options.num_beams:
            return False
        if self._options.early_stopping is True:
            return True
        length_penalty = self._options.length_penalty
        can_grow = self._options.early_stopping == "never" and length_penalty > 0
        length = prompt.max_new_tokens if can_grow else prompt.num_steps
        best_score: float = running[0].total_log_probability / length**length_penalty
        return best_score <= prompt.finished[-1].score

    # -- Contexts ----------------------------------------------------------------------------------------

    def _begin(self, prompt: TextContext) -> _PromptSearch:
        end_tokens = frozenset(prompt.eos_token_ids)
        max_new_tokens = prompt.max_length - prompt.current_length
        prompt_context = self._make_context(
            prompt, prompt.all_tokens.tolist(), prompt.max_length + 1, end_tokens
        )
        beams = [_Beam(prompt_context, [], [], 0.0)] if max_new_tokens else []
        return _PromptSearch(prompt, prompt_context, end_tokens, max_new_tokens, beams)

    def _make_context(
        self, source: TextContext, tokens: list[int], max_length: int, end_tokens: frozenset[int]
    ) -> TextContext:
        """Return a context that reports log probabilities and does not end at end-of-sequence tokens."""
        context = TextContext(
            prompt=tokens,
            max_length=max_length,
            tokens=np.array(tokens, np.int64),
            ignore_eos=True,
            log_probabilities=self._num_candidates(end_tokens),
            model_name=source.model_name,
            adapter=source.adapter,
            cache_salt=source.cache_salt,
            token_hash_overrides=dict(source.token_hash_overrides),
            request_id=uuid4().hex,
        )
        self._open_contexts[context.request_id] = context
        return context

    def _assign_contexts(self, prompt: _PromptSearch, continuations: Sequence[_Continuation]) -> None:
        """Assign a context to each continuation."""
        children: dict[str, list[_Continuation]] = {}
        for candidate in continuations:
            children.setdefault(candidate.beam.context.request_id, []).append(candidate)
        for beam in prompt.beams:
            if beam.context.request_id not in children:
                self._release(beam.context)
        contexts: dict[int, TextContext] = {}
        for first_candidate, *other_candidates in children.values():
            for candidate in other_candidates:
                contexts[id(candidate)] = self._fork(prompt, candidate)
            _replace_last(first_candidate.beam.context, first_candidate.token)
            contexts[id(first_candidate)] = first_candidate.beam.context
        prompt.beams = [
            _Beam(
                contexts[id(candidate)],
                [*candidate.beam.token_ids, candidate.token],
                [*candidate.beam.log_probabilities, candidate.log_probability],
                candidate.total_log_probability,
            )
            for candidate in continuations
        ]

    def _fork(self, prompt: _PromptSearch, candidate: _Continuation) -> TextContext:
        parent = candidate.beam.context
        tokens = [*parent.all_tokens[: parent.start_idx].tolist(), candidate.token]
        child = self._make_context(parent, tokens, parent.max_length, prompt.end_tokens)
        self._pipeline.kv.fork(parent, child)
        return child

    def _release(self, context: TextContext) -> None:
        self._pipeline.release(self._open_contexts.pop(context.request_id))

    # -- The model ---------------------------------------------------------------------------------------

    def _next_log_probabilities(self, contexts: Sequence[TextContext]) -> dict[str, Mapping[int, float]]:
        """Return request id -> log probabilities of the best next tokens, with chunked prefill."""
        for context in contexts:
            claim(self._pipeline.kv, context)
        next_log_probabilities: dict[str, Mapping[int, float]] = {}
        while pending := [
            context for context in contexts if context.request_id not in next_log_probabilities
        ]:
            batch: dict[str, TextContext] = {}
            num_tokens_left = self._max_tokens
            for context in pending[: min(self._max_batch_size, self._max_tokens)]:
                if not num_tokens_left:
                    break
                num_tokens = min(context.end_idx - context.start_idx, num_tokens_left)
                context.set_token_indices(active_idx=context.start_idx + num_tokens)
                batch[context.request_id] = context
                num_tokens_left -= num_tokens
            for request_id, response in self._execute(batch).items():
                if response.tokens:  # the prompt is complete
                    next_log_probabilities[request_id] = _next_tokens(response)
        return next_log_probabilities

    def _execute(self, batch: Mapping[str, TextContext]) -> dict[str, TextGenerationResponse]:
        responses = self._pipeline.execute(batch)
        failures = list(self._pipeline.failures.values())
        self._pipeline.failures.clear()
        if failures:
            raise failures[0]
        return responses


def _next_tokens(response: TextGenerationResponse) -> Mapping[int, float]:
    if len(response.tokens) > 1:
        raise UnsupportedFeatureError("beam search", "this pipeline uses speculative decoding: disable it")
    log_probabilities = response.tokens[0].log_probabilities
    assert log_probabilities is not None, "log probabilities are missing"
    return log_probabilities.top_log_probabilities[-1]


def _replace_last(context: TextContext, token: int) -> None:
    """Replace the last sampled token, whose key and value are not computed yet."""
    if int(context.all_tokens[-1]) == token:
        return
    num_committed = context.committed_idx
    context.rollback(1)
    context.update(token)
    context.set_token_indices(committed_idx=num_committed)  # the blocks before this token stay valid
