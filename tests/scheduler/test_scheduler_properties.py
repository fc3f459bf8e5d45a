"""Random workloads and limits: each request gets its exact output once, and every step makes progress."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.fake_pipeline import EOS, FakePipeline, expected_output_tokens
from support.kv_contexts import kv_manager, text_context
from support.random_draws import num_examples

from penstock.errors import InputError
from penstock.pipelines.core import TextContext, TextGenerationResponse
from penstock.scheduler import Scheduler

COMMON_TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3


@dataclass(frozen=True)
class Limits:
    """Limits and settings of a scheduler and its cache."""

    windows: tuple[int | None, ...]
    num_blocks: int
    max_batch_size: int
    max_batch_input_tokens: int
    min_chunk_size: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    num_steps: int


@dataclass(frozen=True)
class Request:
    arrival: int  # number of the step before which the request is submitted
    num_common_tokens: int  # tokens of `COMMON_TOKENS` at the start of the prompt
    own_tokens: tuple[int, ...]  # tokens after the common prefix
    max_new_tokens: int  # maximum number of new tokens
    priority: int
    cancelled_after: int | None  # number of steps after the arrival
    ready_after: int  # number of steps after the arrival
    echo: bool
    fails_after: int | None  # number of steps after the arrival
    ends_at_eos: bool  # whether `EOS` ends the output
    client: str

    @property
    def prompt(self) -> list[int]:
        return [*COMMON_TOKENS[: self.num_common_tokens], *self.own_tokens] or [1]


limit_strategy = st.builds(
    Limits,
    windows=st.sampled_from([(None,), (None, 6), (5,)]),
    num_blocks=st.integers(5, 14),
    max_batch_size=st.integers(2, 6),
    max_batch_input_tokens=st.integers(1, 40),
    min_chunk_size=st.integers(1, 8),
    enable_chunked_prefill=st.booleans(),
    enable_prefix_caching=st.booleans(),
    num_steps=st.integers(1, 4),
)
requests = st.builds(
    Request,
    arrival=st.integers(0, 12),
    num_common_tokens=st.integers(0, 24),
    own_tokens=st.lists(st.integers(1, 3), max_size=4).map(tuple),
    max_new_tokens=st.integers(1, 24),
    priority=st.integers(0, 1),
    cancelled_after=st.sampled_from([None, None, None, 0, 2, 5, 9]),
    ready_after=st.sampled_from([0, 0, 0, 3]),
    echo=st.sampled_from([False, False, False, True]),
    fails_after=st.sampled_from([None, None, None, 1, 4, 8]),
    ends_at_eos=st.booleans(),
    client=st.sampled_from("xxyz"),
)


class Workload:
    """Requests that are run by a scheduler, with a record of how each one ends."""

    def __init__(self, limits: Limits, requests: list[Request]) -> None:
        self.limits, self.step_number = limits, 0
        self.requests = {str(number): request for number, request in enumerate(requests)}
        self.pipeline = FakePipeline(
            kv_manager(
                *[limits.num_blocks] * len(limits.windows),
                windows=limits.windows,
                enable_prefix_caching=limits.enable_prefix_caching,
            )
        )
        self.scheduler: Scheduler[TextContext, TextGenerationResponse] = Scheduler(
            self.pipeline,
            max_batch_size=limits.max_batch_size,
            max_batch_input_tokens=limits.max_batch_input_tokens,
            min_chunk_size=limits.min_chunk_size,
            enable_chunked_prefill=limits.enable_chunked_prefill,
            ready=lambda context: self._is_ready(context.request_id),
        )
        self.contexts: dict[str, TextContext] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: list[tuple[str, str]] = []
        self.admitted: list[str] = []

    def run(self) -> None:
        while self.step_number <= 12 or self.scheduler.has_work:
            for name, request in self.requests.items():
                if request.arrival == self.step_number:
                    self._submit(name, request)
                elif request.cancelled_after == self.step_number - request.arrival:
                    self._cancel(name)
            self._step()
            self.step_number += 1
            assert self.step_number < 2000, "a request does not end"

    def _submit(self, name: str, request: Request) -> None:
        context = text_context(
            request.prompt,
            max_length=len(request.prompt) + request.max_new_tokens,
            request_id=name,
            eos_token_ids={EOS} if request.ends_at_eos else set(),
            priority=request.priority,
            log_probabilities_echo=request.echo,
            client_id=request.client,
        )
        try:
            self.scheduler.submit(context)
        except InputError:
            self.ends.append((name, "refused"))
        else:
            self.contexts[name], self.tokens[name] = context, []

    def _cancel(self, name: str) -> None:
        self.scheduler.cancel(name)
        if name in self.contexts and not any(name == ended_name for ended_name, _ in self.ends):
            self.ends.append((name, "cancelled"))

    def _step(self) -> None:
        num_steps_before = len(self.pipeline.trace)
        self.pipeline.failing_requests = {name for name in self.contexts if self._fails(name)}
        try:
            outputs = self.scheduler.step(self.limits.num_steps)
        except FloatingPointError:
            return  # all parts of the batch failed: no request ends, and the next step repeats the batch
        failures = dict(self.scheduler.failures)
        self.scheduler.failures.clear()
        assert failures.keys() <= self.pipeline.failing_requests
        assert len(outputs) + len(failures) == self.scheduler.last_batch[0]
        self.ends += [(name, "failed") for name in failures]
        for name, output in outputs.items():
            self.tokens[name] += [int(token.next_token) for token in output.tokens]
            if output.is_done:
                self.ends.append((name, "done"))
        trace = self.pipeline.trace[num_steps_before:]
        assert all(sum(rows.values()) <= self.limits.max_batch_input_tokens for rows in trace)
        assert all(len(rows) <= self.limits.max_batch_size for rows in trace)
        assert trace or failures or not self.scheduler.num_running, (
            "a step with running requests computes nothing"
        )
        assert trace or failures or not self.scheduler.num_waiting or self.step_number <= 20, (
            "no waiting request is admitted"
        )
        self.pipeline.kv.check_integrity()
        assigned_names = {name for name, context in self.contexts.items() if context.is_assigned_to_cache}
        ended_names = {name for name, _ in self.ends}
        for name in self.contexts.keys() - assigned_names - ended_names:
            assert self.contexts[name].active_idx == self.contexts[name].end_idx
        assert not assigned_names & ended_names, "an ended request holds blocks"
        assert len(assigned_names) == self.scheduler.num_running
        self.admitted += [context.request_id for context in self.scheduler.admitted]

    def _fails(self, name: str) -> bool:
        return self.requests[name].fails_after == self.step_number - self.requests[name].arrival

    def _is_ready(self, name: str) -> bool:
        return self.step_number >= self.requests[name].arrival + self.requests[name].ready_after


@settings(max_examples=num_examples(60), deadline=None)
@given(limit_strategy, st.lists(requests, min_size=1, max_size=12))
def test_each_request_gets_its_exact_output_once(limits: Limits, requests: list[Request]) -> None:
    workload = Workload(limits, requests)
    workload.run()
    event("preempted" if workload.scheduler.num_preemptions else "not preempted")
    assert sorted(name for name, _ in workload.ends) == sorted(workload.requests), (
        "each request ends exactly once"
    )
    assert not workload.scheduler.failures
    assert workload.pipeline.kv.num_free_blocks == workload.pipeline.kv.num_blocks
    assert not workload.pipeline.kv._prefixes._chains
    assert Counter(workload.pipeline.released) == Counter(workload.contexts.keys())
    for name, reason in workload.ends:
        if name in workload.contexts:
            expected = expected_output_tokens(copy_context(workload.contexts[name]))
            assert workload.tokens[name] == expected[: len(workload.tokens[name])]
            assert reason != "done" or workload.tokens[name] == expected


@settings(max_examples=num_examples(40), deadline=None)
@given(limit_strategy, st.lists(requests, min_size=1, max_size=12))
def test_tokens_are_recomputed_only_after_a_preemption(limits: Limits, requests: list[Request]) -> None:
    workload = Workload(limits, requests)
    workload.run()
    num_restarts = 0
    for name, context in workload.contexts.items():
        steps = [
            (starts[name], rows[name])
            for starts, rows in zip(workload.pipeline.starts, workload.pipeline.trace, strict=True)
            if name in rows
        ]
        if not steps:
            continue
        assert steps[0][0] == context.num_cached_tokens
        restarts = [
            start for (previous_start, rows), (start, _) in pairwise(steps) if start != previous_start + rows
        ]
        num_restarts += len(restarts)
        if not restarts and (name, "done") in workload.ends:
            num_computed = sum(rows for _, rows in steps)
            assert num_computed == context.end_idx - 1 - context.num_cached_tokens
    assert num_restarts <= workload.scheduler.num_preemptions


@settings(max_examples=num_examples(30), deadline=None)
@given(
    limit_strategy,
    st.lists(requests.map(lambda request: replace(request, fails_after=None)), min_size=2, max_size=9),
)
def test_decoding_requests_are_in_every_step(limits: Limits, requests: list[Request]) -> None:
    workload = Workload(limits, requests)
    workload.run()
    if workload.scheduler.num_preemptions or any(request.cancelled_after is not None for request in requests):
        return
    for name in workload.contexts:
        first_decode_step = next(
            (
                step
                for step, (starts, rows) in enumerate(
                    zip(workload.pipeline.starts, workload.pipeline.trace, strict=True)
                )
                if name in rows and starts[name] + rows[name] >= len(workload.requests[name].prompt)
            ),
            None,
        )
        if first_decode_step is not None:
            is_present = [name in rows for rows in workload.pipeline.trace[first_decode_step:]]
            assert is_present == sorted(is_present, reverse=True), "a decoding request is missing in a step"


@settings(max_examples=num_examples(60), deadline=None)
@given(
    limit_strategy,
    st.lists(
        requests.map(lambda request: replace(request, ready_after=0, num_common_tokens=0)),
        min_size=2,
        max_size=14,
    ),
)
def test_requests_of_a_client_are_admitted_in_order(limits: Limits, requests: list[Request]) -> None:
    workload = Workload(limits, requests)
    workload.run()
    for client in "xyz":
        names = [name for name in workload.admitted if workload.requests[name].client == client]
        keys = [
            (-workload.requests[name].priority, workload.requests[name].arrival, int(name)) for name in names
        ]
        for key, later_key in pairwise(keys):
            # A request with a smaller key is admitted later only if it arrived in a later step.
            assert key < later_key or key[1] < later_key[1]


@settings(max_examples=num_examples(60), deadline=None)
@given(limit_strategy, st.lists(requests, min_size=2, max_size=14))
def test_the_number_of_preemptions_is_bounded(limits: Limits, requests: list[Request]) -> None:
    """A preemption makes the shares of clients more equal. Only arrivals and ends make shares less equal."""
    workload = Workload(replace(limits, num_blocks=400), requests)
    workload.run()
    assert workload.scheduler.num_preemptions <= len(requests) * limits.max_batch_size
    assert not workload.scheduler._shares.is_contended


def copy_context(context: TextContext) -> TextContext:
    """Return a new context with the prompt, the maximum length and the EOS ids of ``context``."""
    return text_context(
        context.prompt_tokens.tolist(), max_length=context.max_length, eos_token_ids=context.eos_token_ids
    )
