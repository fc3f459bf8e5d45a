"""Alternating runs of two engines: workloads, figures, ratios, tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import cast

import pytest
from support import fake_engine

from benchmarks.peers.comparing import Comparison, compare, report_row
from benchmarks.peers.engines import Engine
from benchmarks.peers.reporting import format_number, markdown_table, plot, ratios_where_more_is_better
from benchmarks.peers.workloads import WORKLOADS, Result, largest_max_length, random_prompts, run, with_sizes

LOAD = {"model": "model", "encoding": "int4", "num_threads": 2, "max_length": 64, "num_prompts": 1}
VOCAB_SIZE = 100


@pytest.fixture
def engines(tmp_path: Path) -> Comparison:
    def open_engine(name: str, watch_memory: bool) -> Engine:
        log = tmp_path / f"{name}{next(numbers)}"
        return Engine([sys.executable, fake_engine.__file__], LOAD, {}, log, watch_memory)

    numbers = count()
    speeds: Iterator[int] = count(10)
    return Comparison(
        partial(open_engine, "ours"),
        partial(open_engine, "theirs"),
        VOCAB_SIZE,
        num_pairs=2,
        probe=lambda: {"gb_s": next(speeds), "tflop_s": 1.0},
        log=lambda text: None,
    )


def test_each_figure_of_each_workload_has_a_row(engines: Comparison, tmp_path: Path) -> None:
    actual = compare(
        [WORKLOADS[name] for name in ("cold", "decode", "prefill", "batch", "long", "memory")], engines
    )
    rows = {(row["work"], row["of"]): row for row in actual["rows"]}
    assert list(rows) == [
        ("decode", ""),
        ("prefill", ""),
        ("batch", "of 32"),
        ("long", "at 128"),
        ("long", "at 4096"),
        ("long", "share"),
        ("cold", ""),
        ("memory", ""),
    ]
    for row in rows.values():
        assert len(row["ours"]) == len(row["theirs"]) == len(row["machine"]) == 2
        assert row["same_first_token"] == 2  # both engines count upwards from the same prompts
        assert row["ratio"] > 0
    assert rows["decode", ""]["gb_s"] == 11.5  # the mean of 11 and 12; the warm-up has 10
    assert rows["memory", ""]["median_ours"] > 1
    assert [row["less_is_better"] for row in rows.values()] == 6 * [False] + 2 * [True]
    assert set(actual["versions"]) == {"penstock", "peer"}
    json.dumps(actual)
    # Two engines stay loaded, and each run of cold and memory starts another engine with its own log file.
    assert len(list(tmp_path.iterdir())) == 2 + 2 * 2 * 3


class TimedEngine:
    """An engine whose first token takes 2 s, and whose run takes 5 s, or 11 s for a long prompt."""

    num_first_tokens = 1

    def generate(self, prompts: list[list[int]], num_new_tokens: int) -> dict[str, object]:
        seconds = 11.0 if len(prompts[0]) > 1024 else 5.0
        return {
            "tokens": [[7]],
            "first_output_seconds": 2.0,
            "num_first_tokens": self.num_first_tokens,
            "total_seconds": seconds,
        }


def test_versions_are_reported_if_every_run_starts_a_new_process(engines: Comparison) -> None:
    versions = compare([WORKLOADS["cold"]], engines)["versions"]
    assert set(versions) == {"penstock", "peer"}
    assert all(versions.values())


@pytest.mark.parametrize(
    ("name", "expected_figures"),
    [
        ("decode", {"": 63 / 3}),
        ("prefill", {"": 1024 / 2}),
        ("batch", {"of 32": 32 * 64 / 5}),
        ("long", {"at 128": 63 / 3, "at 4096": 63 / 9, "share": 3 / 9}),
    ],
)
def test_the_figures_of_a_run_follow_from_its_times(name: str, expected_figures: dict[str, float]) -> None:
    workload = WORKLOADS[name]
    actual = run(workload, cast(Engine, TimedEngine()), random_prompts(workload, VOCAB_SIZE, Random()))
    assert actual.figures == pytest.approx(expected_figures)
    assert actual.tokens == [7]


def test_decode_speed_excludes_tokens_of_the_first_output() -> None:
    engine = TimedEngine()
    engine.num_first_tokens = 8
    for name, expected_figures in {"decode": [56 / 3], "long": [56 / 3, 56 / 9, 3 / 9]}.items():
        actual = run(
            WORKLOADS[name], cast(Engine, engine), random_prompts(WORKLOADS[name], VOCAB_SIZE, Random())
        )
        assert list(actual.figures.values()) == pytest.approx(expected_figures)


def test_with_sizes_changes_only_the_workloads_batch_and_long() -> None:
    workloads = {name: with_sizes(workload, batch=4, context=8192) for name, workload in WORKLOADS.items()}
    prompts = {name: random_prompts(workload, VOCAB_SIZE, Random()) for name, workload in workloads.items()}
    assert [len(prompts["batch"]), len(prompts["batch"][0])] == [4, 256]
    assert [len(prompts["long"]), len(prompts["long"][0])] == [1, 8192]
    assert {name: workload for name, workload in workloads.items() if workload != WORKLOADS[name]}.keys() == {
        "batch",
        "long",
    }
    actual = run(workloads["batch"], cast(Engine, TimedEngine()), prompts["batch"])
    assert actual.figures == pytest.approx({"of 4": 4 * 64 / 5})
    assert "at 8192" in run(workloads["long"], cast(Engine, TimedEngine()), prompts["long"]).figures


def make_result(value: float, token: int = 5) -> Result:
    return Result({"": value}, [token, 9])


def test_ratio_is_the_median_of_the_ratios_of_pairs() -> None:
    actual = [
        (make_result(10), make_result(10)),
        (make_result(30), make_result(10)),
        (make_result(16), make_result(8, token=6)),
    ]
    row = report_row(
        WORKLOADS["decode"], "", actual, [{"gb_s": speed, "tflop_s": 1} for speed in (30, 10, 20)]
    )
    assert row["ours"] == [10, 30, 16]
    assert (row["median_ours"], row["median_theirs"]) == (16, 10)
    # The median of the ratios is 2. The ratio of the medians would be 1.6.
    assert (row["ratio"], row["lowest"], row["highest"]) == (
        2,
        1,
        3,
    )
    assert (row["gb_s"], row["same_first_token"], row["unit"]) == (20, 2, "tokens/s")


def test_prompts_are_new_and_have_the_requested_length() -> None:
    rng = Random(0)
    prompts, next_prompts = (random_prompts(WORKLOADS["batch"], VOCAB_SIZE, rng) for _ in range(2))
    assert {len(prompt) for prompt in prompts} == {256}
    assert len(prompts) == 32
    assert prompts != next_prompts
    assert len({tuple(prompt) for prompt in prompts}) == 32
    assert {token for prompt in prompts for token in prompt} <= set(range(3, VOCAB_SIZE))


def test_max_length_covers_all_workloads() -> None:
    assert (
        largest_max_length([WORKLOADS["decode"], WORKLOADS["prefill"]]) == 1088
    )  # 1025 tokens in blocks of 64
    assert largest_max_length([WORKLOADS["decode"]]) == 192


def comparison_report() -> dict[str, object]:
    machine_speeds = [{"gb_s": 30.0, "tflop_s": 0.5}] * 2
    faster_row = report_row(
        WORKLOADS["decode"],
        "",
        [(make_result(30), make_result(20)), (make_result(40), make_result(20))],
        machine_speeds,
    )
    slower_row = report_row(
        WORKLOADS["cold"],
        "",
        [(make_result(4), make_result(2)), (make_result(6), make_result(2))],
        machine_speeds,
    )
    return {
        "peer": "llama_cpp",
        "peer_version": "0.3.36",
        "peer_encoding": "Q4_0",
        "shape": "l1b",
        "encoding": "int4",
        "rows": [faster_row, slower_row],
    }


def test_table_has_a_row_for_each_figure() -> None:
    assert markdown_table([comparison_report()]) == (
        "| model | encoding | work | Penstock | peer | ratio | pairs | machine |\n"
        "|---|---|---|---:|---|---:|---:|---|\n"
        "| l1b | int4 | decode | 35 tokens/s | 20, llama_cpp 0.3.36 Q4_0 | **1.75** (1.50 to 2.00) | 2 "
        "| 30 GB/s, 0.50 TFLOP/s |\n"
        "| l1b | int4 | cold, less is better | 5 s | 2, llama_cpp 0.3.36 Q4_0 | **2.50** (2.00 to 3.00) | 2 "
        "| 30 GB/s, 0.50 TFLOP/s |\n"
    )
    assert [format_number(value) for value in (1234.5, 99.96, 12.345, 0.01234)] == [
        "1234",
        "100",
        "12.3",
        "0.0123",
    ]


def test_ratio_is_inverted_if_less_is_better() -> None:
    faster_row, slower_row = comparison_report()["rows"]  # type: ignore[misc]
    assert ratios_where_more_is_better(faster_row) == (1.75, 1.5, 2)
    assert ratios_where_more_is_better(slower_row) == (0.4, 1 / 3, 0.5)


def test_plot_writes_a_png_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the plot")
    plot([comparison_report(), comparison_report()], tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
