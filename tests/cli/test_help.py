"""How commands take a model, and how ``--help`` lists their options."""

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


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", MODEL_COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    "model", [["./mine"], ["--model", "./mine"], ["./mine", "--model", "./mine"]], ids=" ".join
)
def test_the_model_is_an_argument_or_a_flag(command: list[str], model: list[str]) -> None:
    assert re.search(
        r"^model_path +\./mine +flag$", printed(*command, *model, "--print-config"), flags=re.MULTILINE
    )


@pytest.mark.parametrize("command", MODEL_COMMANDS, ids=" ".join)
def test_two_models_are_refused(command: list[str]) -> None:
    result = CliRunner().invoke(cli, [*command, "./mine", "--model", "./other", "--print-config"])
    assert result.exit_code == 2
    assert result.stderr == (
        "penstock: error: the model is given twice, as './mine' and as --model './other': give one\n"
    )


def sections(*command: str) -> dict[str, list[str]]:
    """Return the headings of ``--help``, each with the first flag of every option below it."""
    found: dict[str, list[str]] = {}
    for line in printed(*command, "--help").splitlines():
        if heading := re.fullmatch(r"([A-Z].*):", line):
            found[heading[1]] = []
        elif flag := re.match(r"  (?:-h, )?(--[\w-]+)", line):
            found[[*found][-1]].append(flag[1])
    return found


@pytest.mark.parametrize("command", MODEL_COMMANDS, ids=" ".join)
def test_settings_are_listed_by_section(command: list[str]) -> None:
    found = sections(*command)
    assert next(iter(found)) == "Options"
    assert {"--help", "--config-file", "--print-config"} <= {*found["Options"]}
    assert "--model" in found["Model"]
    assert "--max-length" in found["Model"]
    assert "--kv-cache-memory" in found["KV cache"]
    assert "--lora" in found["LoRA adapters"]
    assert "--speculative-method" in found["Speculation"]
    assert "--max-batch-size" in found["Execution"]
    assert max(map(len, found.values())) <= 20
    flags = [flag for below in found.values() for flag in below]
    assert len(flags) == len({*flags})


def test_the_server_s_settings_are_listed_by_section() -> None:
    found = sections("serve")
    assert found["Server"] == ["--host", "--port", "--playground"]
    assert {"--api-key", "--cors-origins"} <= {*found["Access"]}
    assert {"--max-body-size", "--keep-alive", "--worker-timeout"} <= {*found["Limits and time-outs"]}
    assert {"--unknown-fields", "--tool-call-parser"} <= {*found["Requests and answers"]}
    assert "--log-level" in found["Log and traces"]


def test_sampling_parameters_have_a_section() -> None:
    assert {"--temperature", "--top-k", "--seed", "--stop"} <= {*sections("generate")["Sampling"]}
