"""`AdaptiveDraftLength` on simulated machines: the draft lengths give nearly the maximum decoding speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
from support.pipeline_steps import make_context

from penstock.pipelines.core import TextContext
from penstock.pipelines.speculative import AdaptiveDraftLength, FixedDraftLength
from penstock.pipelines.speculative.draft_length import StepCosts

CostFunction = Callable[[int], float]


class SimulatedMachine:
    """A machine with a given acceptance rate of each context and a given time of a forward."""

    def __init__(
        self,
        acceptance_rates: Sequence[float],
        cost: CostFunction,
        draft_cost: float = 0.0,
        noise: float = 0.0,
        max_length: int = 8,
    ) -> None:
        self.acceptance_rates, self.cost, self.draft_cost, self.noise = (
            list(acceptance_rates),
            cost,
            draft_cost,
            noise,
        )
        self.policy = AdaptiveDraftLength(max_length)
        self.contexts: list[TextContext] = [
            make_context([1], request_id=str(i)) for i in range(len(acceptance_rates))
        ]
        self.random = Random(0)
        self.max_drafts = 100
        self.num_steps = 0

    def step(self) -> tuple[list[int], int, float]:
        """Run a step. Return the draft lengths, the number of output tokens, and the seconds."""
        draft_lengths = self.policy.lengths(self.contexts, [self.max_drafts] * len(self.contexts))
        drafts = [[0] * draft_length for draft_length in draft_lengths]
        num_accepted = [
            self._draw_num_accepted(acceptance_rate, draft_length)
            for acceptance_rate, draft_length in zip(self.acceptance_rates, draft_lengths, strict=True)
        ]
        num_rows = len(draft_lengths) + sum(draft_lengths)
        slowdown = 1 + self.noise * self.random.random() ** 4 * 5
        forward_seconds = self.cost(num_rows) * slowdown
        proposal_seconds = max(draft_lengths) * self.draft_cost
        self.policy.record_step(num_rows, max(draft_lengths), forward_seconds, proposal_seconds)
        self.policy.observe(self.contexts, drafts, num_accepted)
        return draft_lengths, len(draft_lengths) + sum(num_accepted), forward_seconds + proposal_seconds

    def run(self, num_steps: int) -> tuple[list[float], float]:
        """Run steps. Return the mean draft length of each context, and the tokens per second."""
        total_lengths, tokens, seconds = [0] * len(self.acceptance_rates), 0, 0.0
        for _ in range(num_steps):
            draft_lengths, num_tokens, duration = self.step()
            total_lengths = [a + b for a, b in zip(total_lengths, draft_lengths, strict=True)]
            tokens, seconds = tokens + num_tokens, seconds + duration
        return [draft_length / num_steps for draft_length in total_lengths], tokens / seconds

    def _draw_num_accepted(self, acceptance_rate: float, draft_length: int) -> int:
        count = 0
        while count < draft_length and self.random.random() < acceptance_rate:
            count += 1
        return count


def memory_bound(num_rows: int) -> float:
    """Return the seconds of a step that mainly reads weights, so that more rows cost little."""
    return 0.010 + 0.0002 * num_rows


def compute_bound(num_rows: int) -> float:
    """Return the seconds of a step whose time is proportional to its rows."""
    return 0.010 * num_rows


def test_drafts_that_are_always_accepted_become_long() -> None:
    machine = SimulatedMachine([1.0], memory_bound)
    machine.run(30)
    (draft_length,), speed = machine.run(100)
    assert draft_length > 7
    assert speed > 5 / memory_bound(1)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(
    ("acceptance_rate", "cost"), [(0.0, memory_bound), (0.9, compute_bound), (0.3, compute_bound)]
)
def test_few_tokens_are_drafted_if_drafts_do_not_increase_the_speed(
    acceptance_rate: float, cost: CostFunction, noise: float
) -> None:
    machine = SimulatedMachine([acceptance_rate], cost, noise=noise)
    machine.run(150)
    (draft_length,), speed = machine.run(600)
    assert draft_length < (2.5 if noise else 0.2)
    assert speed > (0.85 if noise else 0.93) / (cost(1) * (1 + noise))


def test_a_draft_model_is_used_only_if_it_is_fast_enough() -> None:
    machine = SimulatedMachine([0.8], memory_bound, draft_cost=0.012)
    machine.run(150)
    assert machine.run(300)[0][0] < 0.1
    machine = SimulatedMachine([0.8], memory_bound, draft_cost=0.001)
    machine.run(150)
    assert machine.run(300)[0][0] > 2


def test_the_draft_length_of_a_context_follows_its_own_acceptance() -> None:
    machine = SimulatedMachine([1.0, 0.0, 0.5, 1.0], memory_bound)
    machine.run(60)
    (always_accepted, never_accepted, half_accepted, always_accepted_too), _ = machine.run(300)
    assert min(always_accepted, always_accepted_too) > 6
    assert never_accepted < 0.3
    assert never_accepted < half_accepted < always_accepted


def test_a_large_batch_has_shorter_drafts_than_a_small_one() -> None:
    def cost(num_rows: int) -> float:
        return 0.010 if num_rows <= 16 else 0.010 + 0.001 * (num_rows - 16)

    mean_lengths = []
    for batch_size in (1, 8, 32):
        machine = SimulatedMachine([0.7] * batch_size, cost)
        machine.run(60)
        mean_lengths.append(sum(machine.run(100)[0]) / batch_size)
    assert mean_lengths[0] > mean_lengths[1] > mean_lengths[2]


def test_a_few_slow_steps_do_not_shorten_drafts() -> None:
    num_slow_steps = 6

    def cost(num_rows: int) -> float:
        return memory_bound(num_rows) * (5 if machine.num_steps < num_slow_steps and num_rows > 1 else 1)

    machine = SimulatedMachine([1.0], cost)
    for machine.num_steps in range(80):
        machine.step()
    machine.num_steps = 80
    assert machine.run(50)[0][0] > 7


def test_drafting_resumes_when_drafts_are_accepted_again() -> None:
    machine = SimulatedMachine([0.0], memory_bound)
    machine.run(2000)
    machine.acceptance_rates = [1.0]
    num_steps = 0
    while machine.step()[0] != [8]:
        num_steps += 1
        assert num_steps < 600, "a context is probed at least every 256 steps"


@pytest.mark.parametrize("acceptance_rate", [0.1, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("slope", [0.0002, 0.002, 0.006])
def test_the_adaptive_length_is_close_to_the_best_fixed_length(acceptance_rate: float, slope: float) -> None:
    def cost(num_rows: int) -> float:
        return 0.010 + slope * (num_rows - 1)

    def fixed_length_speed(draft_length: int) -> float:
        expected = sum(acceptance_rate**j for j in range(draft_length + 1))
        return expected / cost(1 + draft_length)

    machine = SimulatedMachine([acceptance_rate], cost)
    machine.run(100)
    _, speed = machine.run(800)
    assert speed > 0.85 * max(map(fixed_length_speed, range(9)))
    assert speed > 0.93 * fixed_length_speed(0)


def test_limits_are_respected_and_released_contexts_leave_no_state() -> None:
    machine = SimulatedMachine([1.0, 1.0], memory_bound)
    assert machine.policy.lengths(machine.contexts, [0, 3])[0] == 0
    assert max(machine.policy.lengths(machine.contexts, [3, 3])) <= 3
    for context in machine.contexts:
        machine.policy.release(context)
    assert not machine.policy._acceptances
    assert FixedDraftLength(4).lengths(machine.contexts, [9, 2]) == [4, 2]


def test_costs_of_unmeasured_row_counts_are_estimated() -> None:
    costs = StepCosts()

    def seconds(num_rows: int, longest_draft: int) -> float:
        return float(costs.seconds(np.array([num_rows]), np.array([longest_draft]))[0])

    assert seconds(9, 0) > seconds(1, 0)
    costs.add(2, 0, 1.0, 0.0)
    assert seconds(2, 0) < 0.7, "a single slow step does not set the cost"
    for _ in range(2):
        costs.add(2, 0, 9.0, 0.0)
    for _ in range(3):
        costs.add(6, 2, 2.0, 0.4)
    assert seconds(2, 0) == 1
    assert seconds(4, 0) == 1.5
    assert seconds(6, 3) == pytest.approx(2.6)
    assert 2 < seconds(12, 0) < 2.2, "more rows than measured are estimated to cost little"
    assert seconds(1, 0) == 0.5, "fewer rows than measured are estimated in proportion"
    for _ in range(3):
        costs.add(4, 0, 50.0, 0.0)  # three slow steps; earlier steps with 6 rows took 2 s
    assert seconds(4, 0) == 2
    for _ in range(50):
        costs.add(2, 0, 1.5, 0.0)
    assert seconds(2, 0) == pytest.approx(1.5, rel=0.01)
