"""Checkpoint formats: how a checkpoint stores the weights of linear layers. One file per format.

A file of this folder holds one record, ``FORMAT``. A format is independent of the architecture: it determines
the stored encoding of each layer, and reads the layer in that encoding or as floats. Files whose names begin
with an underscore are shared by several formats.

Importing this package loads no torch. The methods that read tensors import it when they are called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ConfigError
from penstock.host.discovery import modules_in
from penstock.kernels.encodings import ENCODINGS, encoding_named
from penstock.weights.safetensors import QuantizedHeader, TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

Headers = Mapping[str, TensorHeader]
LayerPolicy = Callable[[str], str | None]
"""Name of a layer -> its stored encoding; None for a layer of plain floats."""


class TensorReader(Protocol):
    """Reads tensors of a checkpoint's files. The tensors are views of the mapped files."""

    def tensor(self, header: TensorHeader, index: int | None = None) -> Tensor:
        """Return a tensor in its stored type, or one part of it along the first dimension."""
        ...

    def file_bytes(self, header: TensorHeader) -> Tensor:
        """Return all bytes of the file that contains a tensor, as uint8."""
        ...


class CheckpointFormat(ABC):
    """One way of storing the weights of linear layers."""

    name: str
    """The name of its file; also used in messages."""
    quant_methods: tuple[str, ...] = ()
    """Values of ``quantization_config.quant_method`` in ``config.json`` that this format reads."""
    kept_encodings: tuple[str, ...] = ()
    """Encodings in which the format returns layers; others are read as floats."""
    keeps_floats: bool = False
    """Whether layers of plain floats stay floats if the user sets no encoding."""
    unread_if_zero: tuple[str, ...] = ()
    """Patterns of tensors that a model may ignore if they contain only zeros."""
    priority: int = 0
    """If several formats detect a checkpoint, the one with the highest priority reads it."""

    @abstractmethod
    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        """Return whether a checkpoint is of this format.

        Args:
            config: the content of ``config.json``; empty if the checkpoint has none.
            headers: the stored tensors by name.
        """

    def policy(self, config: Mapping[str, object]) -> LayerPolicy | None:
        """Return the encoding of each layer. None, the default: all layers are plain floats."""
        return None

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        """Return the tensors for the model, with the names and shapes of plain checkpoints.

        A format that stores one weight as several tensors replaces them by one `QuantizedHeader` named
        ``<layer>.weight``. By default the stored tensors are returned, with the encodings of `policy`.

        Raises:
            WeightsError: the tensors of a layer do not fit together.
        """
        policy = self.policy(config)
        if policy is None:
            return stored
        return {
            name: replace(header, encoding=policy(name.removesuffix(".weight")))
            if name.endswith(".weight") and len(header.shape) == 2
            else header
            for name, header in stored.items()
        }

    def model_encoding(self, headers: Headers) -> str | None:
        """Return the default encoding of the model; None: the type of the plain floats.

        By default it is the encoding of the stored type that takes the most bytes.
        """
        sizes: dict[str, int] = {}
        encodings: dict[str, str | None] = {}
        for header in headers.values():
            sizes[header.type_name] = sizes.get(header.type_name, 0) + header.num_bytes
            encodings[header.type_name] = header.encoding or encodings.get(header.type_name)
        largest = max(sizes, key=lambda name: sizes[name], default=None)
        return None if largest is None else encodings[largest]

    def read_linear(
        self, source: TensorReader, header: TensorHeader
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        """Return the encoding of a weight ``[out, in]``, and its tensors as `LinearEncoding.pack` does.

        The encoding is ``header.encoding``, or None if ``weight`` holds floats. All tensors have one row per
        output, so that the layers of one input can be concatenated. An encoded weight has its inputs in the
        order of ``header.order``.
        """
        return None, {"weight": source.tensor(header)}

    def read_tensor(self, source: TensorReader, header: TensorHeader) -> Tensor:
        """Return a tensor as floats, in the shape of its header."""
        encoding, tensors = self.read_linear(source, header)
        if encoding is None:
            return tensors["weight"]
        weight = encoding_named(encoding).unpack(tensors)
        if isinstance(header, QuantizedHeader) and header.order:
            weight = in_original_order(weight, header.order)
        return weight.T if header.is_transposed else weight


class FormatRegistry:
    """The checkpoint formats of this folder and of further folders.

    Args:
        folders: folders to search besides this one.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._more_folders = tuple(folders)
        self._added: tuple[CheckpointFormat, ...] = ()

    @property
    def formats(self) -> tuple[CheckpointFormat, ...]:
        """All formats, highest priority first."""
        known = {one.name: one for one in (*self._found, *self._added)}
        return tuple(sorted(known.values(), key=lambda one: (-one.priority, one.name)))

    @property
    def quant_methods(self) -> tuple[str, ...]:
        """All values of ``quant_method`` that some format reads."""
        return tuple(sorted(method for record in self.formats for method in record.quant_methods))

    def detect(self, config: Mapping[str, object], headers: Headers) -> CheckpointFormat:
        """Return the format of a checkpoint.

        Args:
            config: the content of ``config.json``; empty if the checkpoint has none.
            headers: the stored tensors by name.

        Raises:
            ConfigError: no format reads the checkpoint's ``quant_method``.
        """
        for record in self.formats:
            if record.detect(config, headers):
                return record
        known = ", ".join(("plain floats", *self.quant_methods))
        quantized = " or ".join(name for name in ENCODINGS.names if not ENCODINGS[name].is_float)
        raise ConfigError(
            "quantization_config.quant_method",
            f"checkpoints of {quant_method(config)!r} cannot be read: use one of {known}, such as the model "
            f"that this one was made from, and --quantization-encoding {quantized} to quantize it at load",
        )

    @contextmanager
    def extended(self, *formats: CheckpointFormat) -> Iterator[None]:
        """Add formats within a ``with`` block, in this process only."""
        before = self._added
        self._added = (*before, *formats)
        try:
            yield
        finally:
            self._added = before

    @cached_property
    def _found(self) -> tuple[CheckpointFormat, ...]:
        return tuple(_record(module) for module in modules_in(__name__, self._more_folders))


FORMATS = FormatRegistry()
"""The checkpoint formats of this process."""


def in_original_order(weight: Tensor, order: bytes) -> Tensor:
    """Return a weight ``[out, in]``, given in the order of `QuantizedHeader.order`, in the original order."""
    import torch

    places = torch.frombuffer(bytearray(order), dtype=torch.int32).argsort()
    return weight[:, places]


def quantization_section(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``quantization_config`` of a ``config.json``, or of its text model; empty if there is none."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            section = place.get(key)
            if isinstance(section, Mapping):
                return section
    return {}


def quant_method(config: Mapping[str, object]) -> object:
    """Return ``quantization_config.quant_method`` of a ``config.json``, or None."""
    return quantization_section(config).get("quant_method")


def _record(module: ModuleType) -> CheckpointFormat:
    record, name = getattr(module, "FORMAT", None), module.__name__.rpartition(".")[2]
    if not isinstance(record, CheckpointFormat) or record.name != name:
        raise ConfigError("checkpoint format", f"{module.__file__} must hold FORMAT, with the name {name!r}")
    return record
