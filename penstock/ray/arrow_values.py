"""Conversion of the values of Arrow columns, which Ray Data and parquet files use."""

from __future__ import annotations

from typing import Any


def without_nulls(value: Any) -> Any:
    """Return the value of an Arrow column with lists instead of arrays, and without null members.

    All structures of an Arrow column have the same members. Members that a row lacks are null.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
