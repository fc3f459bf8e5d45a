"""``penstock list``: architectures, tasks, weight encodings and formats, or the downloaded models."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TypedDict

import click


@click.command("list")
@click.option("--local", is_flag=True, help="List the models in the cache of the Hugging Face hub.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(local: bool, as_json: bool) -> None:
    """List architectures with tasks and weight encodings, and the supported formats.

    The formats are those of tool calls, reasoning and checkpoints, and the GGUF block types.

    With --local, list the models that were downloaded, with revision, branches and tags, size and last use.
    """
    if local:
        _list_local(as_json)
        return
    support = describe()
    if as_json:
        click.echo(json.dumps(support, ensure_ascii=False))
        return
    rows = [
        [
            architecture["name"],
            architecture["task"],
            _join_names(architecture["encodings"]),
            _join_names(architecture["examples"]),
        ]
        for architecture in support["architectures"]
    ]
    _print_table(["architecture", "task", "encodings", "known to work"], rows)
    for title, names in (
        ("tool calls", support["tool_call_parsers"]),
        ("reasoning", support["reasoning_parsers"]),
        ("checkpoint formats", support["checkpoint_formats"]),
        ("GGUF blocks", support["gguf_types"]),
    ):
        click.echo(f"\n{title}: {_join_names(names)}")


class ArchitectureSupport(TypedDict):
    """A supported architecture."""

    name: str
    task: str
    encodings: list[str]
    examples: list[str]


class Support(TypedDict):
    """The supported architectures, parsers, checkpoint formats and GGUF types."""

    architectures: list[ArchitectureSupport]
    tool_call_parsers: list[str]
    reasoning_parsers: list[str]
    checkpoint_formats: list[str]
    gguf_types: list[str]


def _list_local(as_json: bool) -> None:
    from penstock.cli.formatting import file_size
    from penstock.weights.hub_cache import cache_size, cached_models

    models = cached_models()
    if as_json:
        rows = []
        for model in models:
            fields = asdict(model)
            rows.append({"model": fields.pop("name"), **fields, "path": str(model.path)})
        click.echo(json.dumps({"models": rows, "num_bytes": cache_size()}, ensure_ascii=False))
        return
    table = [
        [
            model.name,
            (model.revision or "-")[:12],
            _join_names([*model.refs]),
            file_size(model.num_bytes),
            _age(time.time() - model.last_used),
            "" if model.is_complete else "incomplete",
        ]
        for model in models
    ]
    _print_table(["model", "revision", "branches, tags", "size", "last used", ""], table)
    click.echo(f"\ntotal {file_size(cache_size())}")


def _age(seconds: float) -> str:
    """Return an age as text; ``now`` below one minute.

    >>> _age(7300)
    '2 hours ago'
    """
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length)
        if count > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "now"


def describe() -> Support:
    """Return the supported architectures, parsers and formats from the registries; loads no torch."""
    from penstock.architectures.registry import PIPELINE_REGISTRY
    from penstock.serve.parsers.formats import TOOL_FORMATS
    from penstock.serve.parsers.reasoning import REASONING_FORMATS
    from penstock.weights.formats import FORMATS
    from penstock.weights.gguf_names import READABLE_BLOCKS

    return {
        "architectures": [
            {
                "name": architecture.name,
                "task": architecture.task.value,
                "encodings": list(architecture.encodings),
                "examples": list(architecture.example_repo_ids),
            }
            for architecture in PIPELINE_REGISTRY.architectures
        ],
        "tool_call_parsers": sorted(TOOL_FORMATS),
        "reasoning_parsers": sorted(REASONING_FORMATS),
        "checkpoint_formats": [
            format_reader.name
            for format_reader in sorted(FORMATS.formats, key=lambda format_reader: format_reader.name)
        ],
        "gguf_types": list(READABLE_BLOCKS),
    }


def _join_names(names: list[str]) -> str:
    return ", ".join(names) or "-"


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
