"""The simulated cluster: virtual time, the router, prefix hits, agreement with queueing theory."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from penstock.bench.simulation.clock import BusyServer, Clock
from penstock.bench.simulation.cluster import POLICIES, Cluster, capacity
from penstock.bench.simulation.costs import ClusterCosts, RouterCosts, StepCostTable, WorkerLimits
from penstock.bench.simulation.trace import SimulatedConversation, TraceParameters, Turn, make_trace
from penstock.errors import InputError

WORKER_LIMITS = WorkerLimits(
    max_length=1024, max_batch_size=16, max_batch_input_tokens=512, num_blocks=256, block_size=16
)
# Each token of a step takes 1 ms. All other costs are 0, so expected times can be calculated by hand.
COSTS = ClusterCosts(
    {}, WORKER_LIMITS, StepCostTable([1, 2], [0.001, 0.002], 0.0, 0.0), RouterCosts(), message_seconds=0.0
)


def make_turn(seed: int, length: int, num_new_tokens: int, think_seconds: float = 0.0) -> Turn:
    return Turn(np.random.default_rng(seed).integers(0, 999, length), num_new_tokens, think_seconds)


def test_events_run_in_order_of_time() -> None:
    clock, event_names = Clock(), []
    clock.call_at(2.0, lambda: event_names.append(("b", clock.now)))
    clock.call_at(1.0, lambda: clock.call_after(1.0, lambda: event_names.append(("c", clock.now))))
    clock.call_at(1.0, lambda: event_names.append(("a", clock.now)))
    clock.run()
    assert event_names == [("a", 1.0), ("b", 2.0), ("c", 2.0)]


def test_a_busy_server_queues_its_tasks() -> None:
    clock, end_times = Clock(), []
    server = BusyServer(clock)
    for time in (0.0, 0.1, 5.0):
        clock.call_at(time, lambda: server.serve(0.5, lambda: end_times.append(clock.now)))
    clock.run()
    assert end_times == pytest.approx([0.5, 1.0, 5.5])
    assert server.wait_seconds == pytest.approx([0.0, 0.4, 0.0])


def test_the_latency_of_a_request_is_the_sum_of_its_steps() -> None:
    """A prompt of 100 tokens takes 0.1 s, and each further token 1 ms.

    After the first decode step, a pipeline call runs up to 8 steps. Their tokens arrive together. Therefore
    the first token of the second request arrives together with the 7 tokens after it.
    """
    trace = [
        SimulatedConversation("a", 0.0, (make_turn(0, 100, 10),)),
        SimulatedConversation("b", 1.0, (make_turn(1, 100, 50),)),
    ]
    cluster = Cluster(COSTS, 1, "prefix-aware")
    report = cluster.run(trace)
    first_outcome, second_outcome = cluster.outcomes
    assert (first_outcome.first_token_time, first_outcome.end_time) == pytest.approx((0.1, 0.109))
    assert (second_outcome.first_token_time, second_outcome.end_time) == pytest.approx((1.107, 1.149))
    assert report.num_requests == 1  # The first request is in the warm-up, which is not counted.
    assert report.first_token_latency == pytest.approx((0.107, 0.107))
    assert report.latency == pytest.approx((0.149, 0.149))
    assert report.hit_rate == 0


def test_latency_includes_router_decisions_and_messages() -> None:
    trace = [SimulatedConversation(str(n), float(n), (make_turn(n, 96, 1),)) for n in range(5)]
    router = RouterCosts(
        per_decision=0.01, per_worker=0.001, per_block=0.002, per_report=0.005, per_result=0.003
    )
    costs = msgspec.structs.replace(COSTS, router=router, message_seconds=0.1)
    report = Cluster(costs, 2, "random").run(trace)
    decision_seconds, step_seconds, result_seconds = 0.01 + 2 * 0.001 + 6 * 0.002, 0.096, 0.008
    assert report.first_token_latency[0] == pytest.approx(
        decision_seconds + 0.1 + step_seconds + 0.1 + result_seconds
    )
    assert report.router_utilization == pytest.approx(decision_seconds + result_seconds, rel=0.1)


def test_the_second_turn_reuses_the_blocks_of_the_first() -> None:
    turns = (make_turn(0, 160, 16), make_turn(1, 16, 1, think_seconds=2.0))
    trace = [SimulatedConversation("a", 0.0, turns), SimulatedConversation("b", 5.0, (make_turn(2, 16, 1),))]
    report = Cluster(COSTS, 1, "prefix-aware").run(trace)
    assert report.num_requests == 2  # The first turn is in the warm-up, which is not counted.
    # 192 and 16 prompt tokens; the first turn's 175 computed tokens fill 10 blocks of 16.
    assert report.hit_rate == pytest.approx(160 / (192 + 16))


def test_prefix_aware_routing_has_more_hits_than_random_routing_and_is_deterministic() -> None:
    parameters = TraceParameters(
        rate=8.0, num_requests=240, max_length=1024, num_prefixes=12, answer_length=20, think_seconds=2.0
    )
    costs = msgspec.structs.replace(COSTS, step=COSTS.step.scaled(4))
    trace = make_trace(parameters)
    reports = {policy: Cluster(costs, 4, policy).run(trace) for policy in POLICIES}
    assert reports["prefix-aware"].hit_rate > 1.2 * reports["random"].hit_rate
    assert reports["prefix-aware"].first_token_latency[0] < reports["random"].first_token_latency[0]
    assert Cluster(costs, 4, "prefix-aware").run(trace) == reports["prefix-aware"]


def test_the_waiting_time_of_one_worker_agrees_with_queueing_theory() -> None:
    """M/D/1 queue: prompts of 0.1 s, served one at a time, at 70 % load.

    The expected waiting time is rho / (2 (1 - rho)) = 1.17 service times.
    """
    limits = msgspec.structs.replace(WORKER_LIMITS, max_batch_size=1, max_batch_input_tokens=128)
    costs = msgspec.structs.replace(COSTS, limits=limits)
    rng = np.random.default_rng(3)
    arrival_times = np.cumsum(rng.exponential(0.1 / 0.7, 3000))
    trace = [
        SimulatedConversation(str(n), float(arrival_time), (Turn(rng.integers(0, 999, 100), 1, 0.0),))
        for n, arrival_time in enumerate(arrival_times)
    ]
    cluster = Cluster(costs, 1, "least-loaded")
    report = cluster.run(trace)
    waiting_times = [outcome.end_time - outcome.arrival_time - 0.1 for outcome in cluster.outcomes]
    assert np.mean(waiting_times) == pytest.approx(0.1 * 0.7 / (2 * 0.3), rel=0.15)
    assert report.worker_utilization == pytest.approx(0.7, rel=0.05)


def test_the_capacity_of_a_worker_is_computed_from_the_seconds_per_token() -> None:
    parameters = TraceParameters(rate=1.0, num_requests=50, max_length=1024, turns=1.0)
    turns = [turn for conversation in make_trace(parameters) for turn in conversation.turns]
    mean_tokens = np.mean([len(turn.message) + turn.num_new_tokens for turn in turns])
    assert capacity(COSTS, parameters) == pytest.approx(1 / (0.001 * mean_tokens))


def test_a_trace_with_only_one_conversation_is_refused() -> None:
    with pytest.raises(InputError, match="different times"):
        Cluster(COSTS, 1, "random").run([SimulatedConversation("a", 0.0, (make_turn(0, 8, 1),))])
