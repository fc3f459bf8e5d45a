"""`Weights`: the named, memory-mapped tensors of a checkpoint.

`Weights.open` uses the names of `names.plain_names`, which can differ from the names in the files. Errors of
all tensors are collected and reported in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.dtype import DType
from penstock.errors import WeightsError
from penstock.host.heartbeat import beat
from penstock.host.private_memory import allow_mapping
from penstock.weights.checkpoint import Checkpoint, open_checkpoint
from penstock.weights.gguf_names import GGUFTensor
from penstock.weights.mapping import drop_pages, map_file
from penstock.weights.safetensors import QuantizedHeader, TensorHeader

NUM_NAMES_SHOWN = 8
"""Maximum number of tensors that an error message lists per kind of fault. It only counts further tensors."""
_MAX_MISSING = 1000
"""If more tensors are missing, loading fails at once: ``config.json`` probably belongs to another model."""
_MAX_ZEROS = 2**29
"""If faulty tensors are replaced by zeros with more elements than this in total, loading fails at once."""


class Weights:
    """The tensors of a checkpoint by name, read on demand.

    A missing or misshapen tensor does not stop loading, unless there are too many. `tensor` records the fault
    and returns zeros. `finish` reports all faults in one error.

    >>> weights = Weights.open(checkpoint)  # doctest: +SKIP
    >>> norm = weights.tensor("model.norm.weight", (64,))  # doctest: +SKIP
    >>> weights.finish()  # doctest: +SKIP
    """

    def __init__(self, path: Path, names: Mapping[str, str], files: _Files) -> None:
        self._path = path
        self._names = names  # name -> name in the checkpoint
        self._files = files
        self._faults = _Faults()
        self._names_read: set[str] = set()
        self.on_read: Callable[[int], None] | None = None
        """Called with the number of bytes of each tensor that counts as read, to show the progress."""

    @classmethod
    def open(cls, path: Path, *, shapes_only: bool = False) -> Weights:
        """Open a safetensors or GGUF file, or a folder with safetensors files.

        Args:
            path: the file or the folder.
            shapes_only: whether to return tensors on torch's device ``meta``, without data. This suffices to
                check that all tensors of a model exist.

        Raises:
            WeightsError: there is no file, a shard is missing, or a file is damaged.
            UnknownArchitectureError: the file is a GGUF file of an unknown architecture.
            ConfigError: the weights are quantized with a method or a setting that is not supported.
        """
        files = _Files(open_checkpoint(path), shapes_only)
        return cls(path, {name: name for name in files.headers}, files)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors, sorted."""
        return tuple(sorted(self._names))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            WeightsError: there is no tensor of this name.
        """
        return self._header(name).shape

    def dtype(self, name: str) -> DType:
        """Return the element type of a tensor; the nominal float type of a quantized weight.

        Raises:
            WeightsError: there is no tensor of this name, or its type has no `DType`, such as 8-bit floats.
        """
        header = self._header(name)
        if header.dtype is None:
            raise WeightsError(self._path, f"{name} is of type {header.type_name}, which is not supported")
        return header.dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor as floats; for a tensor that `is_mapped`, a view of the mapped file.

        If the tensor is missing, has another shape or cannot be read as floats, the fault is recorded for
        `finish`, and zeros of the requested shape are returned.

        Raises:
            WeightsError: the file cannot be read, or there are too many faults.
        """
        return self._files.tensor(self._names[name]) if self.expect(name, shape) else self._zeros(shape)

    def expect(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether tensor ``name`` can be read as floats of this shape. If not, record a fault.

        In both cases, a tensor that exists counts as read. Callers that do not need its data use this method
        instead of `tensor`.
        """
        header = self._mark_read(name)
        if header is None:
            return False
        if not header.is_float:
            self._faults.unreadable.append(f"{self._label(name)} of type {header.type_name}")
            return False
        return self._fits(name, header, shape)

    def stored_encoding(self, name: str) -> str | None:
        """Return the encoding in which a weight is stored; None if it is missing or is read as floats."""
        header = self._find_header(name)
        return None if header is None else header.encoding

    def input_order(self, name: str) -> bytes:
        """Return the stored order of the inputs of a weight, int32; empty for the original order."""
        header = self._find_header(name)
        return header.input_order if isinstance(header, QuantizedHeader) else b""

    def read_linear(
        self, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        """Return the stored encoding of a linear layer's weight, and the tensors of the weight.

        Args:
            name: name of the weight.
            shape: ``(out, in)``.
            transposed: whether the checkpoint's shape is ``(in, out)``.

        Returns:
            The encoding, and the tensors of `LinearEncoding.pack`, with inputs in the order of `input_order`.
            If no encoding represents the weight, or if `tensor` would record a fault or return no data:
            None, and ``weight [out, in]`` as floats.
        """
        header = self._find_header(name)
        stored_shape = shape[::-1] if transposed else shape
        fits = header is not None and header.shape == stored_shape and header.is_transposed == transposed
        if header is None or header.encoding is None or not fits or self._files.shapes_only:
            floats = self.tensor(name, stored_shape)
            return None, {"weight": floats.T if transposed else floats}
        self._mark_read(name)
        return self._files.linear(self._names[name])

    def rows(
        self, name: str, shape: tuple[int, int], start: int, stop: int
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        """Return the rows ``start`` to ``stop - 1`` of a weight of this shape, like `read_linear`.

        For most matrices in GGUF files, other rows are not read.
        """
        header = self._find_header(name)
        if header is not None and header.shape == shape and not self._files.shapes_only:
            rows = self._files.rows(self._names[name], start, stop)
            if rows is not None:
                self._mark_read(name)
                return rows
        encoding, tensors = self.read_linear(name, shape)
        return encoding, {key: tensor[start:stop] for key, tensor in tensors.items()}

    def is_mapped(self, name: str) -> bool:
        """Return whether a tensor is stored as floats in a safetensors file, which `tensor` maps."""
        header = self._find_header(name)
        return (
            header is not None
            and header.encoding is None
            and not isinstance(header, GGUFTensor | QuantizedHeader)
        )

    def release(self, name: str) -> None:
        """Drop the pages of a tensor from the resident memory.

        The next access reads them from the file again.
        """
        checkpoint_name = self._names.get(name)
        if checkpoint_name is not None:
            self._files.release(checkpoint_name)

    def renamed(self, adapter: Callable[[str], str | None]) -> Weights:
        """Return the same tensors under other names.

        Args:
            adapter: maps a name to the new name, or to None to drop the tensor.

        Raises:
            WeightsError: two tensors get the same name.
        """
        names: dict[str, str] = {}
        for name, checkpoint_name in self._names.items():
            new_name = adapter(name)
            if new_name is None:
                continue
            if new_name in names:
                raise WeightsError(
                    self._path, f"{names[new_name]} and {checkpoint_name} are both read as {new_name}"
                )
            names[new_name] = checkpoint_name
        return Weights(self._path, names, self._files)

    def finish(self, ignore: Iterable[str] = ()) -> None:
        """Check after loading that every tensor was read, and that no fault was recorded.

        Args:
            ignore: shell patterns of names that need not be read, such as ``*.rotary_emb.inv_freq``.

        Raises:
            WeightsError: the check failed. The message lists the missing, misshapen, unreadable and
                unexpected tensors.
        """
        patterns = tuple(ignore)
        unread_names = (name for name in self.names if name not in self._names_read)
        unexpected = [
            self._label(name)
            for name in unread_names
            if not any(fnmatchcase(name, pattern) for pattern in patterns)
            and not self._files.may_stay_unread(name, self._names[name])
        ]
        report = self._faults.report(unexpected)
        if report:
            raise WeightsError(self._path, report)

    @property
    def num_parameters(self) -> int:
        """Number of elements of all tensors."""
        return sum(self._files.headers[name].num_elements for name in self._names.values())

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors as they are stored."""
        return sum(self._files.headers[name].num_bytes for name in self._names.values())

    def _mark_read(self, name: str) -> TensorHeader | None:
        """Mark a tensor as read and return its header.

        If the tensor is missing, record a fault and return None.
        """
        header = self._find_header(name)
        if header is None:
            self._faults.missing.append(name)
            return None
        self._names_read.add(name)
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

    def _find_header(self, name: str) -> TensorHeader | None:
        checkpoint_name = self._names.get(name)
        return None if checkpoint_name is None else self._files.headers[checkpoint_name]

    def _header(self, name: str) -> TensorHeader:
        header = self._find_header(name)
        if header is None:
            raise WeightsError(self._path, f"has no tensor {name}")
        return header

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        self._faults.num_zeros += prod(shape)
        if len(self._faults.missing) > _MAX_MISSING or self._faults.num_zeros > _MAX_ZEROS:
            raise WeightsError(self._path, self._faults.report([]))
        return torch.zeros(shape, device="meta" if self._files.shapes_only else None)

    def _label(self, name: str) -> str:
        stored_name = self._files.headers[self._names[name]].stored_name
        return name if name == stored_name else f"{name} ({stored_name} in the file)"


class _SafetensorsFile(Protocol):
    """An open file of the library safetensors."""

    def get_tensor(self, name: str) -> Tensor: ...


class _Files:
    """The open files of a checkpoint. `Weights` objects with different names can share them."""

    def __init__(self, checkpoint: Checkpoint, shapes_only: bool) -> None:
        self.headers = checkpoint.headers
        self.shapes_only = shapes_only
        self._format = checkpoint.format
        self._open_files: dict[Path, _SafetensorsFile] = {}
        self._file_bytes: dict[Path, Tensor] = {}
        self._mapped: dict[str, list[Tensor]] = {}  # name -> mapped bytes that were read for the tensor

    def tensor(self, name: str) -> Tensor:
        header = self.headers[name]
        if self.shapes_only:
            assert header.dtype is not None
            return torch.empty(header.shape, dtype=header.dtype.to_torch(), device="meta")
        return self._format.read_tensor(self._reader(name), header)

    def linear(self, name: str) -> tuple[str | None, Mapping[str, Tensor]]:
        return self._format.read_linear(self._reader(name), self.headers[name])

    def rows(self, name: str, start: int, stop: int) -> tuple[str | None, Mapping[str, Tensor]] | None:
        """Return rows of a weight as `linear` does; None if they cannot be read separately."""
        header = self.headers[name]
        part = header.rows(start, stop) if isinstance(header, GGUFTensor) else None
        return None if part is None else self._format.read_linear(self._reader(name), part)

    def may_stay_unread(self, name: str, checkpoint_name: str) -> bool:
        """Return whether the format allows that a model does not read this tensor, and all values are 0."""
        if self.shapes_only or not any(fnmatchcase(name, pattern) for pattern in self._format.unread_if_zero):
            return False
        return not bool(self.tensor(checkpoint_name).any())

    def release(self, name: str) -> None:
        for tensor in self._mapped.pop(name, ()):
            drop_pages(tensor)

    def open_safetensors(self, file: Path) -> _SafetensorsFile:
        if file not in self._open_files:
            with allow_mapping(file.stat().st_size):
                self._open_files[file] = safe_open(file, framework="pt")
        return self._open_files[file]

    def open_bytes(self, file: Path) -> Tensor:
        if file not in self._file_bytes:
            self._file_bytes[file] = map_file(file)
        return self._file_bytes[file]

    def _reader(self, name: str) -> _Reader:
        mapped: list[Tensor] = []
        self._mapped[name] = mapped
        return _Reader(self, mapped)


class _Reader:
    """The `TensorReader` for one tensor of the checkpoint. It records which mapped bytes were read.

    Args:
        files: the open files.
        mapped: list to which the mapped bytes are appended.
    """

    def __init__(self, files: _Files, mapped: list[Tensor]) -> None:
        self._files = files
        self._mapped = mapped

    def tensor(self, header: TensorHeader, index: int | None = None) -> Tensor:
        try:
            tensor = self._files.open_safetensors(header.file).get_tensor(header.stored_name)
        except (SafetensorError, OSError) as problem:
            raise WeightsError(header.file, f"{header.stored_name} cannot be read: {problem}") from problem
        tensor = tensor if index is None else tensor[index]
        self._mapped.append(tensor)
        return tensor

    def file_bytes(self, header: TensorHeader) -> Tensor:
        assert isinstance(header, GGUFTensor), "only GGUF files are read as bytes"
        data = self._files.open_bytes(header.file)
        self._mapped.append(data[header.offset : header.offset + header.num_bytes])
        return data


@dataclass(slots=True)
class _Faults:
    missing: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    num_zeros: int = 0  # elements of the zeros that replace faulty tensors

    def report(self, unexpected: list[str]) -> str:
        """Return a line that lists the faults by kind; empty without faults."""
        kinds = {
            "missing": self.missing,
            "misshapen": self.misshapen,
            "not of a float type that can be read (F16, BF16, F32, F64)": self.unreadable,
            "unexpected": unexpected,
        }
        return "; ".join(
            f"{len(names)} {kind}: {_join_names(names)}" for kind, names in kinds.items() if names
        )


def _join_names(names: list[str]) -> str:
    shown = ", ".join(names[:NUM_NAMES_SHOWN])
    num_not_shown = len(names) - NUM_NAMES_SHOWN
    return f"{shown} and {num_not_shown} more" if num_not_shown > 0 else shown
