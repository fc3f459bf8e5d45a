"""A griffe extension: the documentation site shows ``>>>`` examples of docstrings as code blocks."""

from __future__ import annotations

from typing import Any

import griffe


class DoctestBlocks(griffe.Extension):
    """Replaces each run of ``>>>`` lines and their output by a fenced code block."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object in a package."""
        _rewrite(obj)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite the docstring of a package. `on_object` is called only for the members of packages."""
        _rewrite(pkg)


def _rewrite(obj: griffe.Object) -> None:
    if obj.docstring is not None:
        obj.docstring.value = with_fences(obj.docstring.value)


def with_fences(text: str) -> str:
    """Return a docstring with its examples in fenced blocks. A blank line ends an example."""
    lines: list[str] = []
    is_open = False
    for line in text.split("\n"):
        is_example_line = line.lstrip().startswith(">>>")
        if is_example_line and not is_open:
            lines.append("```pycon")
            is_open = True
        elif is_open and not line.strip():
            lines.append("```")
            is_open = False
        lines.append(line)
    if is_open:
        lines.append("```")
    return "\n".join(lines)
