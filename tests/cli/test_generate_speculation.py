"""What ``penstock generate`` prints about speculation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.tiny_llm import write_tiny_llm

from penstock.cli.generate import command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("model"))


FLAGS = ["--prompt", "abcabcabc", "--max-new-tokens", "30", "--ignore-eos", "--temperature", "0", "--verbose"]


@pytest.mark.parametrize("count_flags", [[], ["--n", "2"]], ids=["one answer", "several answers"])
def test_speculation_is_reported_in_json_and_on_stderr_if_enabled(
    model: Path, count_flags: list[str]
) -> None:
    speculation_flags = ["--speculative-method", "ngram", "--ngram-min", "1", "--no-adaptive-speculation"]
    result = CliRunner().invoke(
        command, ["--model-path", str(model), *FLAGS, *count_flags, *speculation_flags, "--json"]
    )
    assert result.exit_code == 0, result.output
    speculation = json.loads(result.stdout)["speculation"]
    assert sorted(speculation) == [
        "acceptance_rate",
        "accepted_tokens",
        "forced_tokens",
        "mean_tokens_per_verified_step",
        "proposed_tokens",
        "verified_steps",
    ]
    assert speculation["proposed_tokens"] > 0
    assert "drafted tokens accepted" in result.stderr
    plain_result = CliRunner().invoke(command, ["--model-path", str(model), *FLAGS, *count_flags, "--json"])
    assert "speculation" not in json.loads(plain_result.stdout)
    assert "drafted tokens" not in plain_result.stderr
