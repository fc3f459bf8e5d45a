"""``penstock bench run``: every workload on a small model, and two workloads on random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.tiny_llm import CONFIG, write_tiny_llm

from penstock.bench.workloads import WORKLOADS
from penstock.cli import cli
from penstock.cli.bench_run import command

SMALL_SIZES = ("--prompt-length", "8", "--prefill-length", "20", "--new-tokens", "4", "--batch", "3")


def run_bench(*flags: object) -> Result:
    return CliRunner().invoke(cli, ["bench", "run", *SMALL_SIZES, "--repeats", "2", *map(str, flags)])


def figures_by_workload(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(figure["work"], figure["of"]): figure for figure in json.loads(file.read_text())["figures"]}


def test_every_workload_writes_its_figures(tmp_path: Path) -> None:
    model = write_tiny_llm(tmp_path / "tiny")
    file, plot = tmp_path / "a.json", tmp_path / "a.png"
    result = run_bench("--model", model, "--json", file, "--plot", plot)
    assert result.exit_code == 0, result.output
    actual = figures_by_workload(file)
    assert [workload for workload, _ in actual] == [
        *("decode", "prefill", "batch"),
        *("start", "start", "start", "start", "memory", "step", "step"),
    ]
    assert {figure["work"] for figure in actual.values()} == set(WORKLOADS)
    for figure in actual.values():
        assert len(figure["runs"]) == 2
        assert 0 < figure["lowest"] <= figure["median"] <= figure["highest"]
        assert figure["median"] == sum(figure["runs"]) / 2
    assert [detail for workload, detail in actual if workload == "batch"] == ["3 prompts"]
    start_phases = ("imports", "model", "first token")
    for run in range(2):
        assert (
            sum(actual["start", phase]["runs"][run] for phase in start_phases)
            <= actual["start", "all"]["runs"][run]
        )
    for workload, description in WORKLOADS.items():
        assert f"{workload}: {description[:30]}" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(file.read_text())
    assert report["sizes"]["prefill_length"] == 20
    assert report["environment"]["threads"] == 1
    has_kernels = report["environment"]["isa"] != "none"
    assert report["decoding"].startswith(
        "compiled: " if has_kernels else "eager: the reference kernels cannot compile steps"
    )
    assert "decoding" in " ".join(result.stdout.split())


def test_a_model_of_random_weights_is_measured(tmp_path: Path) -> None:
    shape, file = tmp_path / "config.json", tmp_path / "a.json"
    shape.write_text(json.dumps(CONFIG | {"hidden_size": 64, "dtype": "bfloat16"}))
    result = run_bench("--shape", shape, "--work", "prefill", "--work", "decode", "--json", file)
    assert result.exit_code == 0, result.output
    assert [workload for workload, _ in figures_by_workload(file)] == ["decode", "prefill"]
    assert json.loads(file.read_text())["model"] == str(shape)


@pytest.mark.parametrize(
    ("flags", "expected_message"),
    [
        (("--shape", "l2m"), "there is no shape 'l2m': use l110m, l1b, q800m, or the path of a config.json"),
        (("--shape", "l110m", "--model", "demo"), "--shape and --model exclude each other"),
        (
            ("--work", "prefill", "--prefill-length", "5000"),
            "prefill: needs 5001 tokens, but the maximum length is",
        ),
        (("--work", "decode", "--new-tokens", "1"), "'--new-tokens'"),
        (("--json", "/nowhere/a.json"), "/nowhere/a.json"),
        (("--max-length", "none"), "max_length"),
    ],
)
def test_invalid_options_are_refused(flags: tuple[str, ...], expected_message: str) -> None:
    result = run_bench(*flags)
    assert result.exit_code == 2
    assert expected_message in result.stderr


def test_print_config_shows_the_settings_without_measuring() -> None:
    result = run_bench("--print-config", "--max-length", "99")
    assert result.exit_code == 0
    assert "99" in result.stdout


def test_the_choices_of_the_option_work_are_the_workloads() -> None:
    (option,) = (param for param in command.params if param.name == "workloads")
    assert tuple(option.type.choices) == tuple(WORKLOADS)  # type: ignore[attr-defined]
