"""``penstock list``: the tables, and the JSON output."""

from __future__ import annotations

import json

from click.testing import CliRunner

from penstock.architectures.registry import PIPELINE_REGISTRY
from penstock.cli import cli
from penstock.serve.parsers.formats import TOOL_FORMATS
from penstock.serve.parsers.reasoning import REASONING_FORMATS
from penstock.weights.gguf_names import READABLE_BLOCKS


def test_the_tables_list_architectures_parsers_and_gguf_types() -> None:
    result = CliRunner().invoke(cli, ["list"])
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.split("\n\n")[0].splitlines()[1:]]
    assert [row[0] for row in rows] == [candidate.name for candidate in PIPELINE_REGISTRY.architectures]
    assert [row[1] for row in rows] == [candidate.task.value for candidate in PIPELINE_REGISTRY.architectures]
    assert all(row[2] == "float32," for row in rows)
    assert "hermes" in result.stdout
    assert "Q4_K" in result.stdout


def test_json_lists_architectures_parsers_and_gguf_types() -> None:
    actual = json.loads(CliRunner().invoke(cli, ["list", "--json"]).stdout)
    architectures_by_name = {(entry["name"], entry["task"]): entry for entry in actual["architectures"]}
    for architecture in PIPELINE_REGISTRY.architectures:
        entry = architectures_by_name.pop((architecture.name, architecture.task.value))
        assert tuple(entry["encodings"]) == architecture.encodings
        assert tuple(entry["examples"]) == architecture.example_repo_ids
    assert not architectures_by_name
    assert set(actual["tool_call_parsers"]) == set(TOOL_FORMATS)
    assert set(actual["reasoning_parsers"]) == set(REASONING_FORMATS)
    assert actual["gguf_types"] == list(READABLE_BLOCKS)
