"""A checkpoint's ``config.json``, read as it is written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError
from penstock.weights.checkpoint import is_gguf
from penstock.weights.gguf_config import gguf_config
from penstock.weights.json_files import read_json_object

_MAX_COUNT = 2**31 - 1
_OTHER_SPELLING = {"dtype": "torch_dtype", "torch_dtype": "dtype"}  # transformers 5, and before


class HuggingFaceConfig(Mapping[str, Any]):
    """The values of a ``config.json`` as attributes and as a mapping.

    Nested objects (``text_config``, ``rope_scaling``) are of this class too. ``dtype`` and ``torch_dtype``
    are one key under its two spellings; everything else is left as it is. A key that is not there is a
    `CheckpointError` that names it, and an `AttributeError` or `KeyError`, so that ``getattr`` with a
    default, ``get`` and ``in`` work.

    >>> config = HuggingFaceConfig({"hidden_size": 64, "rope_scaling": {"factor": 8.0}})
    >>> config.hidden_size, config.rope_scaling.factor, config.get("head_dim", 16)
    (64, 8.0, 16)
    """

    def __init__(self, values: Mapping[str, Any], path: str = "config.json") -> None:
        self._values = dict(values)
        self._path = path

    @classmethod
    def from_checkpoint(cls, checkpoint: Path) -> HuggingFaceConfig:
        """Reads the ``config.json`` in a checkpoint's folder, or what a GGUF file holds in place of one.

        Raises:
            CheckpointError: it is not there, or not a JSON object; the GGUF file is damaged.
        """
        if is_gguf(checkpoint):
            return cls(gguf_config(checkpoint), str(checkpoint))
        path = checkpoint / "config.json"
        return cls(read_json_object(path), str(path))

    def to_dict(self) -> dict[str, Any]:
        """A copy as a plain dict, nested objects too."""
        return {key: _plain(value) for key, value in self._values.items()}

    def count(self, key: str, default: int | None = None, *, most: int = _MAX_COUNT) -> int:
        """A whole number from 1 to ``most``; ``default`` where the key is absent or null.

        Raises:
            CheckpointError: it is something else, or absent without a default.
        """
        value = self.get(key) if default is not None else self[key]
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(self._path, f"{key} must be a whole number of at least 1, was {value!r}")
        if value > most:
            raise CheckpointError(self._path, f"{key} must be at most {most}, was {value}")
        return value

    def positive(self, key: str, default: float) -> float:
        """A number above 0; ``default`` where the key is absent or null.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        if value is None:
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise CheckpointError(self._path, f"{key} must be a number above 0, was {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; ``default`` where the key is absent or null.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(self._path, f"{key} must be true or false, was {value!r}")
        return default if value is None else value

    def section(self, key: str) -> HuggingFaceConfig:
        """A nested object; an empty one where the key is absent or null.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        if value is None:
            return HuggingFaceConfig({}, f"{self._path}: {key}")
        if not isinstance(value, HuggingFaceConfig):
            raise CheckpointError(self._path, f"{key} must be a JSON object, was {value!r}")
        return value

    @property
    def vocabulary_size(self) -> int:
        """How many tokens there are, of the text in a model of more than text; 0 where nothing says so."""
        return (self.section("text_config") or self).count("vocab_size", default=0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_values", "_path"):  # copy and pickle ask before __init__
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise _MissingAttributeError(self._path, f"has no {name!r}") from None

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            key = _OTHER_SPELLING.get(key, key)
        if key not in self._values:
            raise _MissingKeyError(self._path, f"has no {key!r}")
        value = self._values[key]
        return HuggingFaceConfig(value, f"{self._path}: {key}") if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"HuggingFaceConfig({self._values!r})"


class _MissingAttributeError(CheckpointError, AttributeError):
    pass


class _MissingKeyError(CheckpointError, KeyError):
    __str__ = Exception.__str__  # KeyError would quote the sentence


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
