"""`Cluster`: runs a trace of requests in virtual time.

The simulation uses the router and the schedulers of the engine. Only the forwards are simulated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from penstock.bench.simulation.clock import BusyServer, Clock
from penstock.bench.simulation.costs import ClusterCosts, StepShape
from penstock.bench.simulation.trace import SimulatedConversation, Tokens, TraceParameters, make_trace
from penstock.bench.simulation.worker import SimulatedWorker
from penstock.errors import InputError
from penstock.pipelines.core import RequestContext, SamplingParams, TextContext
from penstock.worker.engine_client import EngineClient
from penstock.worker.messages import StepResults, TextResult
from penstock.worker.router import WorkerRouter
from penstock.worker.routing import LeastLoaded, RoutingPolicy, WorkerLoads

_WARM_UP_FRACTION = 0.25
"""Fraction of the trace's duration before the measurement begins. The warm-up fills the prefix caches."""


class RandomRouting:
    """Chooses workers at random.

    Args:
        seed: the seed of the random numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = random.Random(seed)

    def choose(
        self, context: RequestContext, digests: Sequence[bytes], loads: WorkerLoads, workers: int
    ) -> int:
        """Return the index of a random ready worker. Bit n of ``workers`` is set if worker n is ready."""
        ready_workers = [number for number in range(len(loads.costs)) if workers >> number & 1]
        return self._generator.choice(ready_workers)


POLICIES: Mapping[str, Callable[[], RoutingPolicy | None]] = {
    "prefix-aware": lambda: None,
    "least-loaded": LeastLoaded,
    "random": RandomRouting,
}
"""Name -> function that returns the routing policy; None for the router's default, `PrefixAware`."""


@dataclass(slots=True)
class TurnOutcome:
    """The times of a request, in virtual seconds, and its numbers of tokens."""

    arrival_time: float
    num_prompt_tokens: int
    first_token_time: float = 0.0
    end_time: float = 0.0
    num_new_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ClusterReport:
    """The results of a simulation, from the end of the warm-up to the beginning of the last conversation."""

    num_workers: int
    policy: str
    num_requests: int
    requests_per_second: float
    tokens_per_second: float
    """Number of generated tokens per second."""
    first_token_latency: tuple[float, float]
    """Median and 99th percentile of the seconds from arrival to the first token."""
    latency: tuple[float, float]
    """Median and 99th percentile of the seconds from arrival to the end."""
    hit_rate: float
    """Fraction of the prompt tokens that were in a prefix cache."""
    worker_utilization: float
    """Fraction of the time in which a worker ran steps, averaged over all workers."""
    router_utilization: float
    """Fraction of the time in which the thread of the router was busy."""
    router_wait: float
    """99th percentile of the seconds that a message waited for the thread of the router, in the whole run."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A request that has not ended."""

    context: TextContext
    conversation: SimulatedConversation
    turn_index: int
    """The index of the turn in its conversation."""
    outcome: TurnOutcome


class Cluster:
    """Runs a trace on simulated workers behind the engine's router.

    Args:
        costs: the measured times and limits of workers and router.
        num_workers: the number of workers.
        policy: a name of `POLICIES`.
    """

    def __init__(self, costs: ClusterCosts, num_workers: int, policy: str) -> None:
        self._costs = costs
        self._policy = policy
        self._clock = Clock()
        self._router_thread = BusyServer(self._clock)
        self._workers = [SimulatedWorker(self._clock, costs, self._receive) for _ in range(num_workers)]
        # `SimulatedWorker` has all members of `EngineClient` that `WorkerRouter` uses.
        self._router = WorkerRouter(cast("list[EngineClient]", self._workers), POLICIES[policy]())
        self._requests: dict[str, _Request] = {}
        self.outcomes: list[TurnOutcome] = []
        """The outcomes of all requests, in the order of their arrivals."""

    def run(self, trace: Sequence[SimulatedConversation]) -> ClusterReport:
        """Run all requests of a trace and return the report.

        Raises:
            InputError: the trace is empty, or its last conversation begins at time 0, so that no time is left
                after the warm-up.
        """
        if not trace or trace[-1].begin_time <= 0:
            raise InputError("a trace needs two conversations that begin at different times")
        no_tokens = np.empty(0, np.int64)
        for conversation in trace:
            self._clock.call_at(conversation.begin_time, partial(self._send_turn, conversation, 0, no_tokens))
        end = trace[-1].begin_time
        busy_seconds: list[tuple[float, float]] = []
        for time in (_WARM_UP_FRACTION * end, end):
            self._clock.call_at(time, lambda: busy_seconds.append(self._busy_seconds()))
        self._clock.run()
        return self._report(end, *np.subtract(busy_seconds[1], busy_seconds[0]).tolist())

    def _busy_seconds(self) -> tuple[float, float]:
        """Return the busy seconds so far: the sum over all workers, and the busy seconds of the router."""
        return sum(worker.busy_seconds for worker in self._workers), self._router_thread.busy_seconds

    def _send_turn(
        self, conversation: SimulatedConversation, turn_index: int, previous_tokens: Tokens
    ) -> None:
        """Send a turn to the router, with the tokens of the previous turns."""
        turn = conversation.turns[turn_index]
        tokens = np.concatenate([previous_tokens, turn.message])
        context = TextContext(
            prompt="",
            max_length=len(tokens) + turn.num_new_tokens,
            tokens=tokens,
            ignore_eos=True,
            sampling_params=SamplingParams(temperature=0.0),
            request_id=f"{conversation.name}-{turn_index}",
        )
        outcome = TurnOutcome(self._clock.now, len(tokens))
        self.outcomes.append(outcome)
        self._requests[context.request_id] = _Request(context, conversation, turn_index, outcome)
        num_blocks = len(tokens) // self._costs.limits.block_size
        seconds = self._costs.router.decision_seconds(len(self._workers), num_blocks)
        self._router_thread.serve(seconds, lambda: self._submit(context))

    def _submit(self, context: TextContext) -> None:
        self._router.submit(context)

    def _receive(self, report: StepResults, deliver: Callable[[StepResults], None]) -> None:
        """Deliver the report of a step and record its results in the thread of the router."""

        def process() -> None:
            deliver(report)
            for result in report.results:
                assert isinstance(result, TextResult)
                self._record_result(result)

        self._router_thread.serve(self._costs.router.report_seconds(len(report.results)), process)

    def _record_result(self, result: TextResult) -> None:
        """Record the tokens of a request. If the request has ended, schedule the next turn."""
        request, now = self._requests[result.request_id], self._clock.now
        outcome = request.outcome
        if result.tokens and not outcome.num_new_tokens:
            outcome.first_token_time = now
        outcome.num_new_tokens += len(result.tokens)
        if not result.status.is_done:
            return
        del self._requests[result.request_id]
        outcome.end_time = now
        outcome.num_cached_tokens = request.context.num_cached_tokens
        turn_index, turns = request.turn_index + 1, request.conversation.turns
        if turn_index < len(turns):
            tokens = request.context.all_tokens.astype(np.int64)
            self._clock.call_after(
                turns[turn_index].think_seconds,
                partial(self._send_turn, request.conversation, turn_index, tokens),
            )

    def _report(self, last_begin: float, workers_busy: float, router_busy: float) -> ClusterReport:
        begin = _WARM_UP_FRACTION * last_begin
        arrived_turns = [outcome for outcome in self.outcomes if begin <= outcome.arrival_time <= last_begin]
        ended_turns = [outcome for outcome in self.outcomes if begin <= outcome.end_time <= last_begin]
        measured_seconds, num_workers = last_begin - begin, len(self._workers)
        num_prompt_tokens = sum(outcome.num_prompt_tokens for outcome in arrived_turns)
        return ClusterReport(
            num_workers=num_workers,
            policy=self._policy,
            num_requests=len(arrived_turns),
            requests_per_second=len(ended_turns) / measured_seconds,
            tokens_per_second=sum(outcome.num_new_tokens for outcome in ended_turns) / measured_seconds,
            first_token_latency=_percentiles(
                [outcome.first_token_time - outcome.arrival_time for outcome in arrived_turns]
            ),
            latency=_percentiles([outcome.end_time - outcome.arrival_time for outcome in arrived_turns]),
            hit_rate=sum(outcome.num_cached_tokens for outcome in arrived_turns) / num_prompt_tokens,
            worker_utilization=workers_busy / measured_seconds / num_workers,
            router_utilization=router_busy / measured_seconds,
            router_wait=float(np.percentile(self._router_thread.wait_seconds, 99)),
        )


def capacity(costs: ClusterCosts, parameters: TraceParameters) -> float:
    """Return the estimated requests per second of one worker without a prefix cache.

    The cost of a request is the time of its prompt tokens in full prefill steps of at most 512 tokens, plus
    the time of its answer tokens in decode steps with as many requests as fit into the batch and the cache.
    """
    limits, step = costs.limits, costs.step
    trace = make_trace(parameters)
    answers = [turn.num_new_tokens for conversation in trace for turn in conversation.turns]
    mean_prompt_length, mean_answer_length = _mean_prompt_length(trace), sum(answers) / len(answers)
    step_tokens = min(limits.max_batch_input_tokens, 512)
    prefill_token_seconds = (
        step.step_seconds(StepShape(step_tokens, 1, step_tokens * step_tokens // 2, step_tokens))
        / step_tokens
    )
    batch_size = max(
        1,
        min(
            limits.max_batch_size,
            int(limits.num_blocks * limits.block_size / (mean_prompt_length + mean_answer_length)),
        ),
    )
    num_keys = int(batch_size * (mean_prompt_length + mean_answer_length / 2))
    decode_token_seconds = (
        step.step_seconds(StepShape(batch_size, batch_size, num_keys, num_keys)) / batch_size
    )
    return 1 / (mean_prompt_length * prefill_token_seconds + mean_answer_length * decode_token_seconds)


def _mean_prompt_length(trace: Sequence[SimulatedConversation]) -> float:
    """Return the mean number of prompt tokens of a request."""
    lengths = []
    for conversation in trace:
        length = 0
        for turn in conversation.turns:
            lengths.append(length + len(turn.message))
            length = lengths[-1] + turn.num_new_tokens
    return sum(lengths) / len(lengths)


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    median, high = np.percentile(seconds, [50, 99])
    return float(median), float(high)
