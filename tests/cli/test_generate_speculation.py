"""The output of ``penstock generate`` about drafts."""

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


@pytest.mark.parametrize("n", [[], ["--n", "2"]], ids=["one", "several"])
def test_speculation_in_json_and_in_words(model: Path, n: list[str]) -> None:
    drafting = ["--speculative-method", "ngram", "--ngram-min", "1", "--no-adaptive-speculation"]
    told = CliRunner().invoke(command, ["--model-path", str(model), *FLAGS, *n, *drafting, "--json"])
    assert told.exit_code == 0, told.output
    speculation = json.loads(told.stdout)["speculation"]
    assert sorted(speculation) == [
        "acceptance_rate",
        "accepted_tokens",
        "forced_tokens",
        "mean_tokens_per_verified_step",
        "proposed_tokens",
        "verified_steps",
    ]
    assert speculation["proposed_tokens"] > 0
    assert "drafted tokens accepted" in told.stderr
    plain = CliRunner().invoke(command, ["--model-path", str(model), *FLAGS, *n, "--json"])
    assert "speculation" not in json.loads(plain.stdout)
    assert "drafted tokens" not in plain.stderr
