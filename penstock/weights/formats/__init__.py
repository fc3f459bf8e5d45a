"""Checkpoint formats: how a checkpoint stores the weights of linear layers. One file per format.

Files whose names begin with an underscore are shared by several formats. Each other file of this folder
defines one record, ``FORMAT``. A format is independent of the architecture. It determines the stored encoding
of each layer, and reads the layer in that encoding or as floats.

Importing this package does not import torch. The methods that read tensors import torch when they are called.
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
"""Returns the stored encoding of a layer, given its name; None for a layer of plain floats."""


class TensorReader(Protocol):
    """Reads tensors from the files of a checkpoint. The tensors are views of the mapped files."""

    def tensor(self, header: TensorHeader, index: int | None = None) -> Tensor:
        """Return a tensor in its stored type, or with ``index`` one slice along its first dimension."""
        ...

    def file_bytes(self, header: TensorHeader) -> Tensor:
        """Return all bytes of the file that contains a tensor, as uint8."""
        ...


class CheckpointFormat(ABC):
    """A way of storing the weights of linear layers in a checkpoint."""

    name: str
    """The name of the format's Python module; also used in messages."""
    quant_methods: tuple[str, ...] = ()
    """Values of ``quantization_config.quant_method`` in ``config.json`` that this format reads."""
    kept_encodings: tuple[str, ...] = ()
    """Encodings in which the format can return layers. Other layers are read as floats."""
    keeps_floats: bool = False
    """Whether layers of plain floats stay floats if no encoding is configured."""
    unread_if_zero: tuple[str, ...] = ()
    """Name patterns of tensors that a model may ignore if they contain only zeros."""
    priority: int = 0
    """If several formats detect a checkpoint, the format with the highest priority is used."""

    @abstractmethod
    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        """Return whether a checkpoint has this format.

        Args:
            config: the content of ``config.json``; empty if the checkpoint has none.
            headers: name -> header of each stored tensor.
        """

    def policy(self, config: Mapping[str, object]) -> LayerPolicy | None:
        """Return a function that gives the stored encoding of each layer.

        The default is None: all layers are plain floats.
        """
        return None

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        """Return name -> header of the tensors that the model reads, as in an unquantized checkpoint.

        A format that stores one weight as several tensors replaces their headers by one `QuantizedHeader`
        named ``<layer>.weight``. By default the headers of the stored tensors are returned, with the
        encodings of `policy`.

        Raises:
            WeightsError: the types or shapes of the tensors of a layer are inconsistent.
            ConfigError: a setting in ``quantization_config`` is not supported.
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
        """Return the default encoding of the model; None for the type of its plain floats.

        This implementation returns the encoding of the stored type that takes the most bytes.
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
        """Return the encoding of a weight ``[out, in]``, and its tensors as in `LinearEncoding.pack`.

        The encoding is ``header.encoding``, or None if the stored values do not fit into that encoding. For
        the encoding None, the only tensor is ``weight`` in floats. All tensors have one row per output, so
        that layers with the same input can be concatenated. If ``header.input_order`` is not empty, the
        inputs of a quantized weight are in that order.
        """
        return None, {"weight": source.tensor(header)}

    def read_tensor(self, source: TensorReader, header: TensorHeader) -> Tensor:
        """Return a tensor as floats, in the shape of its header."""
        encoding, tensors = self.read_linear(source, header)
        if encoding is None:
            return tensors["weight"]
        weight = encoding_named(encoding).unpack(tensors)
        if isinstance(header, QuantizedHeader) and header.input_order:
            weight = restore_input_order(weight, header.input_order)
        return weight.T if header.is_transposed else weight


class FormatRegistry:
    """The checkpoint formats in this folder and in further folders.

    Args:
        folders: folders to search besides this one.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._extra_folders = tuple(folders)
        self._registered: tuple[CheckpointFormat, ...] = ()

    @property
    def formats(self) -> tuple[CheckpointFormat, ...]:
        """All formats, highest priority first."""
        records_by_name = {record.name: record for record in (*self._discovered_formats, *self._registered)}
        return tuple(sorted(records_by_name.values(), key=lambda record: (-record.priority, record.name)))

    @property
    def quant_methods(self) -> tuple[str, ...]:
        """All values of ``quant_method`` that can be read."""
        return tuple(sorted(method for record in self.formats for method in record.quant_methods))

    def detect(self, config: Mapping[str, object], headers: Headers) -> CheckpointFormat:
        """Return the format of a checkpoint.

        Args:
            config: the content of ``config.json``; empty if the checkpoint has none.
            headers: name -> header of each stored tensor.

        Raises:
            ConfigError: no format detects the checkpoint.
        """
        for record in self.formats:
            if record.detect(config, headers):
                return record
        methods = ", ".join(("plain floats", *self.quant_methods))
        quantized = " or ".join(name for name in ENCODINGS.names if not ENCODINGS[name].is_float)
        raise ConfigError(
            "quantization_config.quant_method",
            f"checkpoints of {quant_method(config)!r} cannot be read: use one of {methods}, such as the "
            f"model that this one was made from, and --quantization-encoding {quantized} to quantize it at "
            "load",
        )

    @contextmanager
    def extended(self, *formats: CheckpointFormat) -> Iterator[None]:
        """Add formats within a ``with`` block, in this process only."""
        previous = self._registered
        self._registered = (*previous, *formats)
        try:
            yield
        finally:
            self._registered = previous

    @cached_property
    def _discovered_formats(self) -> tuple[CheckpointFormat, ...]:
        return tuple(_load_format(module) for module in modules_in(__name__, self._extra_folders))


FORMATS = FormatRegistry()
"""The checkpoint formats of this process."""


def restore_input_order(weight: Tensor, order: bytes) -> Tensor:
    """Return a weight ``[out, in]`` with its inputs in the original order.

    The given weight has its inputs in the order of `QuantizedHeader.input_order`.
    """
    import torch

    positions = torch.frombuffer(bytearray(order), dtype=torch.int32).argsort()
    return weight[:, positions]


def quantization_section(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the ``quantization_config`` of a ``config.json`` or of its ``text_config``; empty without one.

    ``compression_config`` is another name of this section.
    """
    text_config = config.get("text_config")
    for parent in (config, text_config if isinstance(text_config, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            section = parent.get(key)
            if isinstance(section, Mapping):
                return section
    return {}


def quant_method(config: Mapping[str, object]) -> object:
    """Return ``quantization_config.quant_method`` of a ``config.json``, or None."""
    return quantization_section(config).get("quant_method")


def _load_format(module: ModuleType) -> CheckpointFormat:
    record, name = getattr(module, "FORMAT", None), module.__name__.rpartition(".")[2]
    if not isinstance(record, CheckpointFormat) or record.name != name:
        raise ConfigError("checkpoint format", f"{module.__file__} must define FORMAT with the name {name!r}")
    return record
