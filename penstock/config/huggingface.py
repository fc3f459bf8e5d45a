"""Typed access to a checkpoint's ``config.json``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError
from penstock.weights.checkpoint import is_gguf
from penstock.weights.gguf_config import gguf_config
from penstock.weights.json_files import read_json_object

_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = sys.float_info.max
_KEY_SYNONYMS = {"dtype": "torch_dtype", "torch_dtype": "dtype"}  # new and old key of the element type


class HuggingFaceConfig(Mapping[str, object]):
    """The values of a ``config.json``, as a mapping, as attributes, and through typed accessors.

    Nested objects (``text_config``, ``rope_scaling``) are instances of this class as well. If the file has
    only one of the keys ``dtype`` and ``torch_dtype``, its value is read under both keys.

    Reading a missing key raises a `CheckpointError` with the name of the key. For attribute access this error
    is also an `AttributeError`, and for ``config[key]`` a `KeyError`, so ``getattr`` with a default, ``get``
    and ``in`` work.

    The typed accessors (`integer`, `number`, `flag`, `text`, `section` and so on) check the type of a
    value. Model code uses them instead of plain access.

    >>> config = HuggingFaceConfig({"hidden_size": 64, "rope_scaling": {"factor": 8.0}})
    >>> config.integer("hidden_size"), config.section("rope_scaling").number("factor", 1.0)
    (64, 8.0)
    >>> config.hidden_size, config.rope_scaling.factor, config.get("head_dim", 16)
    (64, 8.0, 16)
    """

    def __init__(self, values: Mapping[str, object], path: str = "config.json") -> None:
        self._values = dict(values)
        self._path = path

    @classmethod
    def from_checkpoint(cls, checkpoint: Path) -> HuggingFaceConfig:
        """Read the ``config.json`` of a checkpoint folder, or the equivalent keys of a GGUF file.

        Raises:
            CheckpointError: ``config.json`` is missing or is not a JSON object, or the GGUF file is damaged
                or not supported.
        """
        if is_gguf(checkpoint):
            return cls(gguf_config(checkpoint), str(checkpoint))
        path = checkpoint / "config.json"
        return cls(read_json_object(path), str(path))

    def to_dict(self) -> dict[str, object]:
        """Return a deep copy as a plain dict."""
        return {key: _plain_value(value) for key, value in self._values.items()}

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_INTEGER
    ) -> int:
        """Return a whole number from ``minimum`` to ``maximum``.

        Args:
            key: the name of the value.
            default: the result if the key is absent or null. Without a default the key is required.
            minimum: the smallest value allowed.
            maximum: the largest value allowed.

        Raises:
            CheckpointError: the value has another type, is out of range, or is missing without a default.
        """
        value = self[key] if default is None else self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise CheckpointError(
                self._path, f"{key} must be a whole number of at least {minimum}, was {value!r}"
            )
        if value > maximum:
            raise CheckpointError(self._path, f"{key} must be at most {maximum}, was {value}")
        return value

    def optional_integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int | None:
        """Return a whole number, None if the value is null, or ``default`` if the key is absent.

        Raises:
            CheckpointError: the value has another type or is out of range.
        """
        if key not in self:
            return default
        return None if self[key] is None else self.integer(key, minimum=minimum)

    def number(self, key: str, default: float) -> float:
        """Return a number above 0, or ``default`` if the key is absent or null.

        Raises:
            CheckpointError: the value is not a finite number above 0.
        """
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_NUMBER:
            raise CheckpointError(self._path, f"{key} must be a number above 0, was {value!r}")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """Return a number above 0, None if the value is null, or ``default`` if the key is absent.

        Raises:
            CheckpointError: the value is not a finite number above 0.
        """
        if key not in self:
            return default
        return None if self[key] is None else self.number(key, 0.0)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false, or ``default`` if the key is absent or null.

        Raises:
            CheckpointError: the value has another type.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(self._path, f"{key} must be true or false, was {value!r}")
        return default if value is None else value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string.

        Args:
            key: the name of the value.
            default: the result if the key is absent or null. Without a default the key is required.

        Raises:
            CheckpointError: the value has another type, or is missing without a default.
        """
        value = self[key] if default is None else self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise CheckpointError(self._path, f"{key} must be text, was {value!r}")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Return a list of whole numbers as a tuple, or None if the key is absent or null.

        Raises:
            CheckpointError: the value has another type.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise CheckpointError(self._path, f"{key} must be a list of whole numbers, was {value!r}")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return a list of strings as a tuple, or None if the key is absent or null.

        Raises:
            CheckpointError: the value has another type.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(self._path, f"{key} must be a list of texts, was {value!r}")
        return tuple(value)

    def section(self, key: str) -> HuggingFaceConfig:
        """Return a nested object, or an empty object if the key is absent or null.

        Raises:
            CheckpointError: the value has another type.
        """
        value = self.get(key)
        if value is None:
            return HuggingFaceConfig({}, f"{self._path}: {key}")
        if not isinstance(value, HuggingFaceConfig):
            raise CheckpointError(self._path, f"{key} must be a JSON object, was {value!r}")
        return value

    def layer_section(self, layer: int) -> HuggingFaceConfig:
        """Return the object in ``per_layer_config`` for a layer, or an empty object if there is none.

        transformers pads the layer indices with zeros to the same length, for example ``"05"``.

        Raises:
            CheckpointError: a value has another type.
        """
        section = self.section("per_layer_config")
        key = next((key for key in section if key.isdecimal() and int(key) == layer), str(layer))
        return section.section(key)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens in the text model's vocabulary, its ``vocab_size``; 0 if the key is missing."""
        size = self.section("text_config").integer("vocab_size", default=0)
        return size or self.integer("vocab_size", default=0)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle read attributes before __init__ has set them.
        if name.startswith("__") or name in ("_values", "_path"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise _MissingAttributeError(self._path, f"has no {name!r}") from None

    def __getitem__(self, key: str) -> object:
        stored_key = key if key in self._values else _KEY_SYNONYMS.get(key, key)
        if stored_key not in self._values:
            raise _MissingKeyError(self._path, f"has no {key!r}")
        value = self._values[stored_key]
        return HuggingFaceConfig(value, f"{self._path}: {stored_key}") if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"HuggingFaceConfig({self._values!r})"


class _MissingAttributeError(CheckpointError, AttributeError):
    pass


class _MissingKeyError(CheckpointError, KeyError):
    __str__ = Exception.__str__  # KeyError would put quotes around the message


def _plain_value(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain_value(inner) for key, inner in value.items()}
    return [_plain_value(inner) for inner in value] if isinstance(value, list) else value
