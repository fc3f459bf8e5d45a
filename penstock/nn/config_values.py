"""`ConfigValues`: the part of `penstock.config.HuggingFaceConfig` that model code reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class ConfigValues(Protocol):
    """The values of a ``config.json``, with an accessor for each type.

    Each typed accessor raises a `CheckpointError` with the key, the value and the expected type, if the value
    has another type or is out of range.
    """

    def integer(self, key: str, default: int | None = None, *, minimum: int = ..., maximum: int = ...) -> int:
        """Return a whole number, or ``default`` if the key is absent or null. Without a default, the key is
        required.
        """
        ...

    def optional_integer(self, key: str, default: int | None = None, *, minimum: int = ...) -> int | None:
        """Return a whole number, None if the value is null, or ``default`` if the key is absent."""
        ...

    def number(self, key: str, default: float) -> float:
        """Return a number above 0, or ``default`` if the key is absent or null."""
        ...

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false, or ``default`` if the key is absent or null."""
        ...

    def section(self, key: str) -> ConfigValues:
        """Return a nested object, or an empty one if the key is absent or null."""
        ...

    def get(self, key: str, /) -> object:
        """Return the stored value, or None if the key is absent."""
        ...

    def __getitem__(self, key: str) -> object: ...

    def __iter__(self) -> Iterator[str]: ...

    def __len__(self) -> int: ...
