"""Commands with options under headings in ``--help``, sizes as text, and the error for unknown commands."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import click

UNGROUPED = "Options"
"""The heading of options without a group."""


class GroupedOption(click.Option):
    """An option that ``--help`` lists under the heading of its group."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose ``--help`` lists options by group; options without a group come first."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {UNGROUPED: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                groups.setdefault(getattr(parameter, "group", UNGROUPED), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def file_size(num_bytes: int) -> str:
    """Return a size as text, with a suitable binary unit.

    >>> file_size(3 * 2**30)
    '3.0 GiB'
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def unknown_command(name: str, commands: Iterable[str], ctx: click.Context) -> click.UsageError:
    """Return the error for a command that does not exist, with the names of similar commands."""
    command_names = [*commands]
    nearest = get_close_matches(name, command_names, n=2, cutoff=0.5)
    hint = (
        f"Did you mean {' or '.join(map(repr, nearest))}?"
        if nearest
        else f"Use one of {', '.join(command_names)}."
    )
    return click.UsageError(f"No such command {name!r}. {hint}", ctx)
