"""Weight encodings: how the weights of linear layers are stored and multiplied. One file per encoding.

A file of this folder defines one record ``ENCODING``, whose name is the name of the file. Files whose names
begin with an underscore are shared by several encodings. No module outside this folder names an encoding,
except the checkpoint formats that return an encoding and the back ends that have kernels for it.

Importing this package does not import torch. The methods that compute import torch when they are called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from penstock.dtype import DType
from penstock.errors import ConfigError
from penstock.host.discovery import modules_in

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.encodings._block_kind import BlockKind
    from penstock.kernels.panels import PanelLayout

LayerRole = Literal["linear", "expert", "values", "head"]
"""The role of a layer: an expert, the value projection of attention, the output head, or any other."""

NumberFormat = Literal["float", "integer", "e4m3"]
"""``float``: floats of `LinearEncoding.storage_dtype`. ``integer``: integers, multiplied as
`kernels.quantized` and `kernels.codes` define. ``e4m3``: 8-bit floats with 4 exponent bits and a float32
scale per group."""


class LinearEncoding(ABC):
    """How the weights of linear layers are stored and multiplied. `multiply` defines the correct results.

    A back end may replace `multiply` by a faster product, whose results must be equal within the bounds of
    the tests.
    """

    name: str
    """Value of ``--quantization-encoding``."""
    compute_dtype: DType
    """Element type of the activations, and of the weights that are not linear layers."""
    storage_dtype: DType
    """Element type of the tensor ``weight`` that `pack` returns."""
    bits: int
    """Bits of one stored weight, without scales."""
    is_float: bool = False
    """Whether weights are plain floats. The encoding then has the name of `compute_dtype`."""
    group_size: int | None = None
    """Number of inputs that share a scale; None if an output has a single scale or no scale."""
    has_zero_points: bool = False
    """Whether a stored integer other than 0 can represent the weight 0."""
    number_format: NumberFormat | None = None
    """How the kernels of back ends interpret the stored weights; None for other formats, such as blocks."""
    block_kind: BlockKind | None = None
    """The parameters of the blocks, if weights are stored in blocks, such as the K types of GGUF."""
    activation_dtype: DType | None = None
    """Type to which `multiply` quantizes activations; None if it does not quantize them.

    A back end may multiply activations without quantizing them, which is more exact.
    """
    needs_calibration: bool = False
    """Whether `pack` uses the ``importance`` of inputs, which is computed from activation statistics."""
    packs_lazily: bool = False
    """Whether packing may be deferred: to the end of the first step, or, with `needs_calibration`, until
    activation statistics are known."""
    max_repeated_inputs: int = 0
    """Maximum number of inputs that a layer may repeat, to divide large weights among the copies of an input.

    See `penstock.nn.outlier_splitting`.
    """
    is_deterministic: bool = True
    """Whether results of a row can be made bit-equal for all batches."""
    is_internal: bool = False
    """Whether only checkpoints, or layers of models in another encoding, use this encoding.

    A user cannot choose an internal encoding.
    """

    @property
    def panels(self) -> PanelLayout | None:
        """The panel layout (`kernels.panels`) of packed weights; None if the encoding has no panel layout."""
        return None

    @property
    def bits_per_weight(self) -> float:
        """Approximate bits per weight in memory, scales included, of a model in this encoding."""
        num_features = 1024
        return self.num_bytes(num_features, num_features) * 8 / num_features**2

    def for_layer(self, role: LayerRole, out_features: int, in_features: int) -> str:
        """Return the name of the encoding of a layer with this role and size, in a model of this encoding."""
        return self.name

    def on_device(self, device_type: str) -> str:
        """Return the name of this encoding, or of its replacement on device types that do not support it."""
        return self.name

    @abstractmethod
    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of a packed weight in panels. For other layouts, see `Backend.num_bytes`."""

    @abstractmethod
    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        """Return the stored form of ``weight [out, in]``: tensors by name.

        Args:
            weight: floats of any type.
            importance: ``[in]``, above 0: weights of the squared errors of each input. None: equal weights.
                Only encodings with `needs_calibration` use it.
        """

    @property
    def split_unit(self) -> int | None:
        """The number of inputs at whose multiples a weight can be split. None: at any input."""
        return self.group_size

    def select_inputs(
        self, name: str, tensors: Mapping[str, Tensor], start: int, stop: int
    ) -> dict[str, Tensor]:
        """Return the stored form of inputs ``start`` to ``stop - 1`` of a weight.

        Args:
            name: the name of the layer, for the error message.
            tensors: the whole weight, as `pack` returns it.
            start: the first input.
            stop: the end of the inputs.

        Raises:
            ConfigError: ``start`` or ``stop`` is no multiple of `split_unit`. ``stop`` may also be the number
                of inputs.
        """
        in_features, unit = tensors["weight"].shape[1], self.split_unit
        if unit is not None and (start % unit or (stop % unit and stop != in_features)):
            raise ConfigError(
                "tensor_parallel_size",
                f"a rank would hold the inputs {start} to {stop - 1} of {name}, but its {self.name} weights "
                f"can be divided only at multiples of {unit} inputs: use another number of ranks",
            )
        selected_tensors = {}
        for tensor_name, tensor in tensors.items():
            inputs_per_number = None if tensor.dim() == 1 else self.inputs_per_number(tensor_name)
            selected_tensors[tensor_name] = (
                tensor
                if inputs_per_number is None
                else tensor[:, start // inputs_per_number : -(-stop // inputs_per_number)]
            )
        return selected_tensors

    def inputs_per_number(self, tensor_name: str) -> int | None:
        """Return how many inputs share one number of a tensor ``[out, n]`` that `pack` returns.

        Returns None if all inputs of an output share one number.
        """
        return 1 if tensor_name == "weight" else self.group_size

    @abstractmethod
    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the weight ``[out, in]`` that the stored form represents."""

    @abstractmethod
    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """Return ``x [T, in]`` times the weight, plus ``bias [out]``: ``[T, out]`` in the type of x.

        The bits of a row do not depend on other rows.
        """


class EncodingRegistry(Mapping[str, LinearEncoding]):
    """The encodings of this folder and of further folders, by name.

    Float encodings come first, then other encodings, each sorted by decreasing number of bits. Encodings that
    `extended` adds come last, unless they replace one of the same name.

    Args:
        folders: folders to search besides this one.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._more_folders = tuple(folders)
        self._added: Mapping[str, LinearEncoding] = {}

    def __getitem__(self, name: str) -> LinearEncoding:
        return self._added.get(name) or self._discovered_encodings[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._discovered_encodings, **self._added})

    def __len__(self) -> int:
        return len({**self._discovered_encodings, **self._added})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the encodings that a user can choose for a model."""
        return tuple(name for name, encoding in self.items() if not encoding.is_internal)

    @property
    def float_names(self) -> tuple[str, ...]:
        """The names of the encodings whose weights are plain floats, such as bfloat16."""
        return tuple(name for name, encoding in self.items() if encoding.is_float)

    @contextmanager
    def extended(self, *encodings: LinearEncoding) -> Iterator[None]:
        """Add encodings to this registry until the end of a ``with`` block."""
        previous_added = self._added
        self._added = {**previous_added, **{encoding.name: encoding for encoding in encodings}}
        try:
            yield
        finally:
            self._added = previous_added

    @cached_property
    def _discovered_encodings(self) -> Mapping[str, LinearEncoding]:
        records = [_load_encoding(module) for module in modules_in(__name__, self._more_folders)]
        records.sort(key=lambda record: (not record.is_float, -record.bits, record.name))
        return {record.name: record for record in records}


ENCODINGS = EncodingRegistry()
"""The encodings of this process."""


def encoding_named(name: str) -> LinearEncoding:
    """Return the encoding of this name.

    Raises:
        ConfigError: no encoding has this name.
    """
    try:
        return ENCODINGS[name]
    except KeyError:
        known = ", ".join(ENCODINGS.names)
        raise ConfigError("quantization_encoding", f"unknown encoding {name!r}: use one of {known}") from None


def _load_encoding(module: ModuleType) -> LinearEncoding:
    """Return the record ``ENCODING`` of a module.

    Raises:
        ConfigError: the module defines no such record, or the name of the encoding differs from the module's
        name.
    """
    record, name = getattr(module, "ENCODING", None), module.__name__.rpartition(".")[2]
    if not isinstance(record, LinearEncoding):
        raise ConfigError("quantization_encoding", f"{module.__file__} must hold ENCODING, a LinearEncoding")
    if record.name != name:
        raise ConfigError(
            "quantization_encoding",
            f"{module.__file__} holds the encoding {record.name!r}: its file must be {record.name}.py",
        )
    return record
