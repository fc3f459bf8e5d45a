"""The named tensors of a checkpoint, memory-mapped, with all faults of a load told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.dtype import DType
from penstock.errors import WeightsError
from penstock.pipelines.weights.safetensors import TensorHeader, read_checkpoint_headers

NUM_NAMES_SHOWN = 8
"""How many tensors of a kind an error lists before it only counts."""
_MOST_FAULTS = 1000
_MOST_ZEROS = 2**29
"""Beyond these a load ends at once: ``config.json`` is of another model, and the zeros take memory."""


class Weights:
    """The tensors of a checkpoint by name, read when asked for.

    A fault does not stop a load: `tensor` records it and stands in zeros, and `finish` reports all faults
    in one error.

    >>> weights = Weights.open(checkpoint)  # doctest: +SKIP
    >>> norm = weights.tensor("model.norm.weight", (64,))  # doctest: +SKIP
    >>> weights.finish()  # doctest: +SKIP
    """

    def __init__(self, path: Path, names: Mapping[str, str], files: _Files) -> None:
        self._path = path
        self._names = names  # ours -> the files'
        self._files = files
        self._faults = _Faults()
        self._read: set[str] = set()

    @classmethod
    def open(cls, path: Path) -> Weights:
        """Opens a safetensors file, or a folder with one or with shards and their index.

        Raises:
            WeightsError: there is none, a shard is missing, or a file is damaged.
        """
        files = _Files(read_checkpoint_headers(path))
        return cls(path, {name: name for name in files.headers}, files)

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors, sorted."""
        return tuple(sorted(self._names))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor.

        Raises:
            WeightsError: there is none of this name.
        """
        return self._header(name).shape

    def dtype(self, name: str) -> DType:
        """The element type of a tensor as it is stored.

        Raises:
            WeightsError: there is none of this name, or its type has no `DType` (8-bit floats).
        """
        header = self._header(name)
        if header.dtype is None:
            raise WeightsError(self._path, f"{name} is of type {header.type_name}, which is not supported")
        return header.dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor ``name`` in its stored float type, mapped from the file.

        Where it is missing, misshapen or no float, that is recorded for `finish`, and zeros of the shape
        asked for are returned.

        Raises:
            WeightsError: the file cannot be read, or there are more faults than any near miss has.
        """
        stored = self._names.get(name)
        if stored is None:
            self._faults.missing.append(name)
            return self._zeros(shape)
        self._read.add(name)
        header = self._files.headers[stored]
        if not header.is_float:
            self._faults.unreadable.append(f"{self._label(name)} of type {header.type_name}")
        elif header.shape != shape:
            self._faults.misshapen.append(
                f"{self._label(name)} is {list(header.shape)} where the model needs {list(shape)}"
            )
        else:
            return self._files.tensor(stored)
        return self._zeros(shape)

    def renamed(self, adapter: Callable[[str], str | None]) -> Weights:
        """The same tensors under other names; ``adapter`` maps a stored name to one, or to None to drop it.

        Raises:
            WeightsError: two tensors get the same name.
        """
        names: dict[str, str] = {}
        for name, stored in self._names.items():
            new = adapter(name)
            if new is None:
                continue
            if new in names:
                raise WeightsError(self._path, f"{names[new]} and {stored} are both read as {new}")
            names[new] = stored
        return Weights(self._path, names, self._files)

    def finish(self, ignore: Iterable[str] = ()) -> None:
        """Ends a load: every tensor must have been read, and none may have been at fault.

        Args:
            ignore: shell patterns of names that may be left unread, such as ``*.rotary_emb.inv_freq``.

        Raises:
            WeightsError: lists missing, misshapen, unreadable and unexpected tensors.
        """
        patterns = tuple(ignore)
        unread = (name for name in self.names if name not in self._read)
        unexpected = [
            self._label(name)
            for name in unread
            if not any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        report = self._faults.report(unexpected)
        if report:
            raise WeightsError(self._path, report)

    @property
    def num_parameters(self) -> int:
        """How many numbers the tensors hold together."""
        return sum(self._files.headers[stored].num_elements for stored in self._names.values())

    @property
    def num_bytes(self) -> int:
        """How many bytes the tensors take as they are stored."""
        return sum(self._files.headers[stored].num_bytes for stored in self._names.values())

    def _header(self, name: str) -> TensorHeader:
        try:
            return self._files.headers[self._names[name]]
        except KeyError:
            raise WeightsError(self._path, f"has no tensor {name}") from None

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        self._faults.num_zeros += prod(shape)
        if len(self._faults.missing) > _MOST_FAULTS or self._faults.num_zeros > _MOST_ZEROS:
            raise WeightsError(self._path, self._faults.report([]))
        return torch.zeros(shape)

    def _label(self, name: str) -> str:
        stored = self._names[name]
        return name if name == stored else f"{name} ({stored} in the file)"


class _Files:
    """The open files of a checkpoint; views under other names share them."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self.headers = headers
        self._open: dict[Path, Any] = {}

    def tensor(self, name: str) -> Tensor:
        file = self.headers[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as problem:
            raise WeightsError(file, f"{name} cannot be read: {problem}") from problem
        assert isinstance(tensor, Tensor)
        return tensor


@dataclass(slots=True)
class _Faults:
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    num_zeros: int = 0  # elements of the tensors that stand in for all these

    def report(self, unexpected: list[str]) -> str:
        """One line, or nothing where there is no fault."""
        kinds = {
            "missing": self.missing,
            "misshapen": self.misshapen,
            "not of a float type that can be read (F16, BF16, F32, F64)": self.unreadable,
            "unexpected": unexpected,
        }
        return "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NUM_NAMES_SHOWN])
    more = len(names) - NUM_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
