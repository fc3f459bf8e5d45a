"""The named tensors of a checkpoint, memory-mapped, with all faults of a load told at once.

Names are plain ones (see `names.plain_names`), whatever the files call them.
"""

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
from penstock.host.heartbeat import beat
from penstock.host.private_memory import mapping
from penstock.weights.checkpoint import read_tensor_headers
from penstock.weights.gguf_names import GGUFTensor
from penstock.weights.gguf_tensors import gguf_rows, gguf_tensor
from penstock.weights.mapping import drop_pages, map_file
from penstock.weights.safetensors import TensorHeader

NUM_NAMES_SHOWN = 8
"""How many tensors of a kind an error lists before it only counts."""
_MAX_FAULTS = 1000
_MAX_ZEROS = 2**29
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
        self.on_read: Callable[[int], None] | None = None
        """Called with the bytes of each tensor that is asked for: how far a load has come."""

    @classmethod
    def open(cls, path: Path, *, shapes_only: bool = False) -> Weights:
        """Opens a safetensors or GGUF file, or a folder with safetensors.

        Args:
            path: the file or the folder.
            shapes_only: tensors are those of torch's device ``meta``, without numbers: enough to see whether
                a model finds all that it needs.

        Raises:
            WeightsError: there is none, a shard is missing, or a file is damaged.
            UnknownArchitectureError: it is a GGUF file of a family that nothing is known of.
        """
        files = _Files(read_tensor_headers(path), shapes_only)
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
        return self._files.tensor(self._names[name]) if self.expect(name, shape) else self._zeros(shape)

    def expect(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether tensor ``name`` is there as floats of this shape; where not, that is recorded for `finish`.

        It counts as read: this is for whoever knows its numbers already.
        """
        header = self._asked_for(name)
        if header is None:
            return False
        if not header.is_float:
            self._faults.unreadable.append(f"{self._label(name)} of type {header.type_name}")
            return False
        return self._fits(name, header, shape)

    def quantized_rows(
        self, name: str, encoding: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> dict[str, Tensor] | None:
        """The weight ``name`` of a linear layer as an encoding stores it in rows, where the checkpoint holds
        just these numbers; None where it does not, and `tensor` is to be asked for floats.

        Args:
            name: of the tensor.
            encoding: such as ``int4``.
            shape: ``(out, in)``.
            transposed: whether the checkpoint's shape is ``(in, out)``.
        """
        header = self._found(name)
        expected = shape[::-1] if transposed else shape
        if not isinstance(header, GGUFTensor) or header.encoding != encoding or header.shape != expected:
            return None
        if header.is_transposed != transposed or self._files.shapes_only:
            return None
        rows = self._files.rows(self._names[name])
        if rows is not None:
            self._asked_for(name)
        return rows

    def is_quantized(self, name: str, encoding: str) -> bool:
        """Whether the checkpoint holds the tensor's numbers as an encoding stores them."""
        header = self._found(name)
        return header is not None and header.encoding == encoding

    def is_mapped(self, name: str) -> bool:
        """Whether `tensor` gives what lies in the file: of safetensors; most of GGUF is widened."""
        header = self._found(name)
        return header is not None and not isinstance(header, GGUFTensor)

    def release(self, name: str) -> None:
        """Lets go of the memory that a tensor's pages of its file take in this process.

        They are read again by whoever looks at the tensor again: no number is lost.
        """
        stored = self._names.get(name)
        if stored is not None:
            self._files.release(stored)

    def bytes_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Tensor ``name`` of bytes, uint8: numbers that are packed in a way that the caller knows.

        Faults are told as `tensor` tells them, and zeros stand in.
        """
        header = self._asked_for(name)
        if header is not None and header.type_name != "U8":
            self._faults.misshapen.append(
                f"{self._label(name)} is of type {header.type_name} where the model needs bytes, U8"
            )
        elif header is not None and self._fits(name, header, shape):
            return self._files.tensor(self._names[name])
        return self._zeros(shape).byte()

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

    def _asked_for(self, name: str) -> TensorHeader | None:
        """Marks a tensor as read; None, and a fault, if there is none of this name."""
        header = self._found(name)
        if header is None:
            self._faults.missing.append(name)
            return None
        self._read.add(name)
        beat()
        if self.on_read is not None:
            self.on_read(header.num_bytes)
        return header

    def _fits(self, name: str, header: TensorHeader, shape: tuple[int, ...]) -> bool:
        if header.shape == shape:
            return True
        self._faults.misshapen.append(
            f"{self._label(name)} is {list(header.shape)} where the model needs {list(shape)}"
        )
        return False

    def _found(self, name: str) -> TensorHeader | None:
        stored = self._names.get(name)
        return None if stored is None else self._files.headers[stored]

    def _header(self, name: str) -> TensorHeader:
        header = self._found(name)
        if header is None:
            raise WeightsError(self._path, f"has no tensor {name}")
        return header

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        self._faults.num_zeros += prod(shape)
        if len(self._faults.missing) > _MAX_FAULTS or self._faults.num_zeros > _MAX_ZEROS:
            raise WeightsError(self._path, self._faults.report([]))
        return torch.zeros(shape, device="meta" if self._files.shapes_only else None)

    def _label(self, name: str) -> str:
        stored = self._files.headers[self._names[name]].stored_name
        return name if name == stored else f"{name} ({stored} in the file)"


class _Files:
    """The open files of a checkpoint; views under other names share them."""

    def __init__(self, headers: Mapping[str, TensorHeader], shapes_only: bool) -> None:
        self.headers = headers
        self.shapes_only = shapes_only
        self._open: dict[Path, Any] = {}
        self._mapped: dict[str, Tensor] = {}  # of tensors that were read, the bytes in their files

    def tensor(self, name: str) -> Tensor:
        header = self.headers[name]
        file = header.file
        if self.shapes_only:
            assert header.dtype is not None
            return torch.empty(header.shape, dtype=header.dtype.to_torch(), device="meta")
        if isinstance(header, GGUFTensor):
            return gguf_tensor(self._map(name, header), header)
        try:
            if file not in self._open:
                with mapping(file.stat().st_size):
                    self._open[file] = safe_open(file, framework="pt")
            tensor = self._open[file].get_tensor(header.stored_name)
        except (SafetensorError, OSError) as problem:
            raise WeightsError(file, f"{name} cannot be read: {problem}") from problem
        assert isinstance(tensor, Tensor)
        self._mapped[name] = tensor
        return tensor

    def rows(self, name: str) -> dict[str, Tensor] | None:
        header = self.headers[name]
        assert isinstance(header, GGUFTensor)
        return gguf_rows(self._map(name, header), header)

    def _map(self, name: str, header: GGUFTensor) -> Tensor:
        """The bytes of the whole file that holds a tensor."""
        if header.file not in self._open:
            self._open[header.file] = map_file(header.file)
        data: Tensor = self._open[header.file]
        self._mapped[name] = data[header.offset : header.offset + header.num_bytes]
        return data

    def release(self, name: str) -> None:
        if (tensor := self._mapped.pop(name, None)) is not None:
            drop_pages(tensor)


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
