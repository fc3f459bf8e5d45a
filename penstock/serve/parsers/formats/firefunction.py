"""Firefunction 2: ``functools[{"name": "f", "arguments": {"a": 1}}]``."""

from __future__ import annotations

from penstock.serve.parsers.formats.json_calls import JsonCalls

FORMAT = JsonCalls("firefunction", "functools", is_list=True, hints=("functools[",))
