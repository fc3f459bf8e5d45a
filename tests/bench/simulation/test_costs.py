"""Costs of steps and of the router: formulas, fitting, measurement and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.bench.simulation.costs import (
    ClusterCosts,
    RouterCosts,
    StepCostTable,
    StepShape,
    WorkerLimits,
    non_negative_least_squares,
)
from penstock.bench.simulation.measure import measure_steps
from penstock.config import PipelineConfig
from penstock.errors import InputError
from penstock.pipelines.core import TextContext

STEP_COSTS = StepCostTable([1, 8, 64], [0.01, 0.02, 0.1], per_sequence=1e-4, per_pair=1e-7, per_key=1e-6)
ROOT = Path(__file__).resolve().parents[3]


def test_step_seconds_add_the_costs_of_rows_sequences_pairs_and_keys() -> None:
    assert STEP_COSTS.step_seconds(StepShape(8, 1, 100, 30)) == pytest.approx(0.02 + 1e-4 + 1e-5 + 3e-5)
    assert STEP_COSTS.step_seconds(StepShape(4, 0, 0, 0)) == pytest.approx(0.01 + 0.01 * 3 / 7)
    assert STEP_COSTS.step_seconds(StepShape(120, 0, 0, 0)) == pytest.approx(0.18)
    shape = StepShape(8, 3, 100, 30)
    assert STEP_COSTS.scaled(4).step_seconds(shape) == pytest.approx(STEP_COSTS.step_seconds(shape) / 4)


def test_the_shape_of_a_batch_counts_the_visible_keys_of_each_row() -> None:
    prompt_context = TextContext(prompt="", max_length=9, tokens=np.arange(4))
    chunk_context = TextContext(prompt="", max_length=9, tokens=np.arange(6))
    chunk_context.set_token_indices(start_idx=3)
    assert StepShape.from_contexts([prompt_context, chunk_context]) == (
        4 + 3,
        2,
        (1 + 2 + 3 + 4) + (4 + 5 + 6),
        4 + 6,
    )


def test_fitting_exact_durations_recovers_the_costs() -> None:
    shapes = [StepShape(n, 1, n * (n + 1) // 2, n) for n in (1, 8, 64)]
    shapes += [StepShape(n, 1, n * 99 + n * (n + 1) // 2, 99 + n) for n in (8, 64)]
    shapes += [StepShape(n, n, n * length, n * length) for n in (1, 8, 64) for length in (16, 512)]
    fitted_costs = StepCostTable.fitted([(shape, STEP_COSTS.step_seconds(shape)) for shape in shapes])
    assert fitted_costs.num_tokens == STEP_COSTS.num_tokens
    assert fitted_costs.seconds == pytest.approx(STEP_COSTS.seconds, rel=1e-6)
    assert fitted_costs.per_sequence == pytest.approx(STEP_COSTS.per_sequence, rel=1e-5)
    assert fitted_costs.per_pair == pytest.approx(STEP_COSTS.per_pair, rel=1e-5)
    assert fitted_costs.per_key == pytest.approx(STEP_COSTS.per_key, rel=1e-5)


def test_fitted_coefficients_are_not_negative() -> None:
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative_least_squares(rows, np.array([3.0, 2.0, 1.0])).tolist() == [2.0, 0.0]
    assert non_negative_least_squares(rows, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])


def test_written_costs_are_read_without_change_and_invalid_costs_are_refused(tmp_path: Path) -> None:
    costs = ClusterCosts(
        {"model": "m"}, WorkerLimits(64, 4, 32, 10, 8), STEP_COSTS, RouterCosts(per_block=1e-6)
    )
    costs.write(tmp_path / "costs.json")
    assert ClusterCosts.read(tmp_path / "costs.json") == costs
    (tmp_path / "costs.json").write_text('{"measured": {}}')
    with pytest.raises(InputError, match=r"costs\.json does not contain the costs of a cluster: .*limits"):
        ClusterCosts.read(tmp_path / "costs.json")
    with pytest.raises(InputError, match="3 sizes and 1 times"):
        StepCostTable([1, 2, 3], [0.1], 0, 0)
    with pytest.raises(InputError, match="must ascend"):
        StepCostTable([2, 1], [0.1, 0.2], 0, 0)


def test_the_committed_costs_can_be_read() -> None:
    costs = ClusterCosts.read(ROOT / "benchmarks" / "cluster_costs.json")
    assert costs.measured["model"]
    assert (
        costs.step.step_seconds(StepShape(32, 32, 4096, 4096))
        > costs.step.step_seconds(StepShape(1, 1, 128, 128))
        > 0
    )
    assert costs.router.decision_seconds(100, 64) > 0


def test_measuring_steps_gives_positive_costs() -> None:
    config = PipelineConfig.from_flat(
        {"model_path": "demo", "num_threads": 1, "kv_cache_memory": "32MiB", "max_batch_size": 4}
    )
    step_costs, limits = measure_steps(config, repeats=1)
    assert limits.max_batch_size == 4
    assert step_costs.num_tokens[0] == 1
    assert min(step_costs.seconds) >= 0
    max_tokens = step_costs.num_tokens[-1]
    longest_prompt_seconds = step_costs.step_seconds(StepShape(max_tokens, 1, max_tokens**2 // 2, max_tokens))
    assert longest_prompt_seconds > step_costs.step_seconds(StepShape(1, 1, 16, 16)) > 0
