"""`AdaptiveDraftLength` on simulated machines: long drafts if they are faster, otherwise none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
from support.pipeline_steps import make_context

from penstock.pipelines.core import TextContext
from penstock.pipelines.speculative import AdaptiveDraftLength, FixedDraftLength
from penstock.pipelines.speculative.draft_length import StepCosts

Cost = Callable[[int], float]


class SimulatedMachine:
    """Simulates contexts whose drafts are accepted with given probabilities, on kernels of a given speed."""

    def __init__(
        self,
        rates: Sequence[float],
        cost: Cost,
        draft_cost: float = 0.0,
        noise: float = 0.0,
        max_length: int = 8,
    ) -> None:
        self.rates, self.cost, self.draft_cost, self.noise = list(rates), cost, draft_cost, noise
        self.policy = AdaptiveDraftLength(max_length)
        self.contexts: list[TextContext] = [make_context([1], request_id=str(i)) for i in range(len(rates))]
        self.random = Random(0)
        self.max_drafts = 100
        self.num_steps = 0

    def step(self) -> tuple[list[int], int, float]:
        """Run a step. Returns the draft lengths, the number of accepted tokens and the seconds."""
        widths = self.policy.lengths(self.contexts, [self.max_drafts] * len(self.contexts))
        drafts = [[0] * width for width in widths]
        accepted = [self._accepted(rate, width) for rate, width in zip(self.rates, widths, strict=True)]
        rows = len(widths) + sum(widths)
        slowness = 1 + self.noise * self.random.random() ** 4 * 5
        forward, proposal = self.cost(rows) * slowness, max(widths) * self.draft_cost
        self.policy.record_step(rows, max(widths), forward, proposal)
        self.policy.observe(self.contexts, drafts, accepted)
        return widths, len(widths) + sum(accepted), forward + proposal

    def run(self, steps: int) -> tuple[list[float], float]:
        """Run steps. Returns the mean draft length of each context, and the tokens per second."""
        total, tokens, seconds = [0] * len(self.rates), 0, 0.0
        for _ in range(steps):
            widths, num_tokens, duration = self.step()
            total = [a + b for a, b in zip(total, widths, strict=True)]
            tokens, seconds = tokens + num_tokens, seconds + duration
        return [width / steps for width in total], tokens / seconds

    def _accepted(self, rate: float, width: int) -> int:
        count = 0
        while count < width and self.random.random() < rate:
            count += 1
        return count


def memory_bound(rows: int) -> float:
    """Return the seconds of a step that is bound by reading weights: more rows cost little."""
    return 0.010 + 0.0002 * rows


def compute_bound(rows: int) -> float:
    """Seconds of a step in which each row costs as much as the first."""
    return 0.010 * rows


def test_drafts_get_longer_while_they_are_accepted() -> None:
    machine = SimulatedMachine([1.0], memory_bound)
    machine.run(30)
    (width,), speed = machine.run(100)
    assert width > 7
    assert speed > 5 / memory_bound(1)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(("rate", "cost"), [(0.0, memory_bound), (0.9, compute_bound), (0.3, compute_bound)])
def test_no_drafts_if_they_are_not_faster(rate: float, cost: Cost, noise: float) -> None:
    machine = SimulatedMachine([rate], cost, noise=noise)
    machine.run(150)
    (width,), speed = machine.run(600)
    assert width < (2.5 if noise else 0.2)
    assert speed > (0.85 if noise else 0.93) / (cost(1) * (1 + noise))


def test_no_drafts_if_the_draft_model_is_too_slow() -> None:
    machine = SimulatedMachine([0.8], memory_bound, draft_cost=0.012)
    machine.run(150)
    assert machine.run(300)[0][0] < 0.1
    machine = SimulatedMachine([0.8], memory_bound, draft_cost=0.001)
    machine.run(150)
    assert machine.run(300)[0][0] > 2


def test_the_draft_length_of_a_context_follows_its_own_acceptance() -> None:
    machine = SimulatedMachine([1.0, 0.0, 0.5, 1.0], memory_bound)
    machine.run(60)
    (always, never, half, also_always), _ = machine.run(300)
    assert min(always, also_always) > 6
    assert never < 0.3
    assert never < half < always


def test_a_large_batch_has_shorter_drafts_than_a_small_one() -> None:
    def cost(rows: int) -> float:
        return 0.010 if rows <= 16 else 0.010 + 0.001 * (rows - 16)

    means = []
    for size in (1, 8, 32):
        machine = SimulatedMachine([0.7] * size, cost)
        machine.run(60)
        means.append(sum(machine.run(100)[0]) / size)
    assert means[0] > means[1] > means[2]


def test_a_few_slow_steps_do_not_shorten_drafts() -> None:
    slow_until = 6

    def cost(rows: int) -> float:
        return memory_bound(rows) * (5 if machine.num_steps < slow_until and rows > 1 else 1)

    machine = SimulatedMachine([1.0], cost)
    for machine.num_steps in range(80):
        machine.step()
    machine.num_steps = 80
    assert machine.run(50)[0][0] > 7


def test_drafting_resumes_when_drafts_are_accepted_again() -> None:
    machine = SimulatedMachine([0.0], memory_bound)
    machine.run(2000)
    machine.rates = [1.0]
    steps = 0
    while machine.step()[0] != [8]:
        steps += 1
        assert steps < 600, "the policy tries a draft at least every 256 steps"


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("slope", [0.0002, 0.002, 0.006])
def test_the_adaptive_length_is_close_to_the_best_fixed_length(rate: float, slope: float) -> None:
    def cost(rows: int) -> float:
        return 0.010 + slope * (rows - 1)

    def speed_of_fixed_length(width: int) -> float:
        expected = sum(rate**j for j in range(width + 1))
        return expected / cost(1 + width)

    machine = SimulatedMachine([rate], cost)
    machine.run(100)
    _, speed = machine.run(800)
    assert speed > 0.85 * max(map(speed_of_fixed_length, range(9)))
    assert speed > 0.93 * speed_of_fixed_length(0)


def test_limits_are_respected_and_released_contexts_leave_no_state() -> None:
    machine = SimulatedMachine([1.0, 1.0], memory_bound)
    assert machine.policy.lengths(machine.contexts, [0, 3])[0] == 0
    assert max(machine.policy.lengths(machine.contexts, [3, 3])) <= 3
    for context in machine.contexts:
        machine.policy.release(context)
    assert not machine.policy._acceptances
    assert FixedDraftLength(4).lengths(machine.contexts, [9, 2]) == [4, 2]


def test_costs_of_unmeasured_sizes_are_estimated() -> None:
    costs = StepCosts()

    def seconds(num_rows: int, depth: int) -> float:
        return float(costs.seconds(np.array([num_rows]), np.array([depth]))[0])

    assert seconds(9, 0) > seconds(1, 0)
    costs.add(2, 0, 1.0, 0.0)
    assert seconds(2, 0) < 0.7, "a single slow step is not trusted"
    for _ in range(2):
        costs.add(2, 0, 9.0, 0.0)
    for _ in range(3):
        costs.add(6, 2, 2.0, 0.4)
    assert seconds(2, 0) == 1
    assert seconds(4, 0) == 1.5
    assert seconds(6, 3) == pytest.approx(2.6)
    assert 2 < seconds(12, 0) < 2.2, "additional rows cost little until they are measured"
    assert seconds(1, 0) == 0.5, "the cost is proportional to the rows until it is measured"
    for _ in range(3):
        costs.add(4, 0, 50.0, 0.0)  # three slow steps; the earlier steps of 6 rows were faster
    assert seconds(4, 0) == 2
    for _ in range(50):
        costs.add(2, 0, 1.5, 0.0)
    assert seconds(2, 0) == pytest.approx(1.5, rel=0.01)
