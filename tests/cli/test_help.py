"""How commands accept a model, and how ``--help`` groups their options."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from penstock.cli import cli

MODEL_COMMANDS = (
    ["generate"],
    ["encode"],
    ["rerank"],
    ["serve"],
    ["warm-cache"],
    ["quantize"],
    ["bench", "run"],
)


def run_without_error(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", MODEL_COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    "model", [["./mine"], ["--model", "./mine"], ["./mine", "--model", "./mine"]], ids=" ".join
)
def test_the_model_can_be_an_argument_or_a_flag(command: list[str], model: list[str]) -> None:
    assert re.search(
        r"^model_path +\./mine +flag$",
        run_without_error(*command, *model, "--print-config"),
        flags=re.MULTILINE,
    )


@pytest.mark.parametrize("command", MODEL_COMMANDS, ids=" ".join)
def test_two_models_are_refused(command: list[str]) -> None:
    result = CliRunner().invoke(cli, [*command, "./mine", "--model", "./other", "--print-config"])
    assert result.exit_code == 2
    assert result.stderr == (
        "penstock: error: the model is given twice, as './mine' and as --model './other': give one\n"
    )


def help_sections(*command: str) -> dict[str, list[str]]:
    """Return the headings of ``--help``, each with the first flag of every option under it."""
    actual: dict[str, list[str]] = {}
    for line in run_without_error(*command, "--help").splitlines():
        if heading := re.fullmatch(r"([A-Z].*):", line):
            actual[heading[1]] = []
        elif flag := re.match(r"  (?:-h, )?(--[\w-]+)", line):
            actual[[*actual][-1]].append(flag[1])
    return actual


@pytest.mark.parametrize("command", MODEL_COMMANDS, ids=" ".join)
def test_settings_are_listed_by_section(command: list[str]) -> None:
    actual = help_sections(*command)
    assert next(iter(actual)) == "Options"
    assert {"--help", "--config-file", "--print-config"} <= {*actual["Options"]}
    assert "--model" in actual["Model"]
    assert "--max-length" in actual["Model"]
    assert "--kv-cache-memory" in actual["KV cache"]
    assert "--lora" in actual["LoRA adapters"]
    assert "--speculative-method" in actual["Speculation"]
    assert "--max-batch-size" in actual["Execution"]
    assert max(map(len, actual.values())) <= 20
    flags = [flag for flags_of_section in actual.values() for flag in flags_of_section]
    assert len(flags) == len({*flags})


def test_settings_of_the_server_are_listed_by_section() -> None:
    actual = help_sections("serve")
    assert actual["Server"] == ["--host", "--port", "--playground"]
    assert {"--api-key", "--cors-origins"} <= {*actual["Access"]}
    assert {"--max-body-size", "--keep-alive", "--worker-timeout"} <= {*actual["Limits and time-outs"]}
    assert {"--unknown-fields", "--tool-call-parser"} <= {*actual["Requests and answers"]}
    assert "--log-level" in actual["Log and traces"]


def test_sampling_parameters_have_a_section() -> None:
    assert {"--temperature", "--top-k", "--seed", "--stop"} <= {*help_sections("generate")["Sampling"]}
