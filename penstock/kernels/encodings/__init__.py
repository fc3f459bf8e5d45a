"""Weight encodings: the stored form of a linear layer's weights, and their product. One file per encoding.

A file of this folder holds one record, ``ENCODING``. Its name is the name of the file. Files whose names
begin with an underscore are shared by several encodings. No module outside this folder names an encoding,
except the checkpoint formats that return one and the back ends that have kernels for one.

Importing this package does not import torch. The methods that compute import it when they are called.
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
"""The role of a layer: any linear layer, an expert, the value projection of attention, or the output head."""

NumberFormat = Literal["float", "integer", "e4m3"]
"""``float``: floats of `storage_dtype`. ``integer``: integers, multiplied as `kernels.quantized` and
`kernels.codes` define. ``e4m3``: 8-bit floats with 4 exponent bits and a float32 scale per group."""


class LinearEncoding(ABC):
    """How the weights of linear layers are stored, and the product that defines correct results.

    A back end may replace `multiply` by a faster product. Its results must be equal within the bounds of the
    tests.
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
    """Inputs that share a scale; None if all inputs of an output share one, or if there are no scales."""
    has_zero_points: bool = False
    """Whether a stored integer other than 0 can represent the weight 0."""
    numbers: NumberFormat | None = None
    """How a back end interprets the stored weights. None: the back end calls `multiply` or unpacks them."""
    block_kind: BlockKind | None = None
    """The parameters of the blocks, if weights are stored in blocks, such as the K types of GGUF."""
    activation_dtype: DType | None = None
    """Type to which `multiply` quantizes activations; None if it does not quantize them.

    A back end may multiply activations without quantizing them, which is more exact.
    """
    needs_calibration: bool = False
    """Whether `pack` can use activation statistics."""
    packs_lazily: bool = False
    """Whether a load may defer packing: to the end of the first step, or, with `needs_calibration`, until
    activation statistics are known."""
    max_repeated_inputs: int = 0
    """Maximum number of inputs that a layer may repeat to divide large weights among the copies; see
    `penstock.nn.outlier_splitting`."""
    is_deterministic: bool = True
    """Whether results of a row can be made bit-equal for all batches."""
    is_internal: bool = False
    """Whether this encoding is used only for some layers of models in another encoding."""

    @property
    def panels(self) -> PanelLayout | None:
        """The panel layout (`kernels.panels`) of packed weights; None if the encoding has none."""
        return None

    @property
    def bits_per_weight(self) -> float:
        """Average bits per weight in memory, scales included, in a large model of this encoding."""
        size = 1024
        return self.num_bytes(size, size) * 8 / size**2

    def for_layer(self, role: LayerRole, out_features: int, in_features: int) -> str:
        """Return the name of the encoding of a layer in a model of this encoding."""
        return self.name

    def on_device(self, device_type: str) -> str:
        """Return the name of the encoding to use on a device type: this one if the device supports it."""
        return self.name

    @abstractmethod
    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of a packed weight in panels. For other layouts, see `Backend.num_bytes`."""

    @abstractmethod
    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        """Return the stored form of ``weight [out, in]``: tensors by name.

        Args:
            weight: floats of any type.
            importance: ``[in]``, above 0: weight of the squared errors of each input. None: all inputs count
                equally. Used only by encodings with `needs_calibration`.
        """

    @property
    def split_unit(self) -> int | None:
        """A weight can be split at multiples of this number of inputs. None: at any input."""
        return self.group_size

    def select_inputs(
        self, name: str, tensors: Mapping[str, Tensor], start: int, stop: int
    ) -> dict[str, Tensor]:
        """Return the stored form of inputs ``start`` to ``stop - 1`` of a weight.

        Args:
            name: the name of the layer, for the error.
            tensors: the whole weight, as `pack` returns it.
            start: the first input; a multiple of `split_unit`.
            stop: the input after the last one; a multiple of `split_unit`, or the number of inputs.

        Raises:
            ConfigError: the split would cut a group of inputs that share a scale.
        """
        in_features, group = tensors["weight"].shape[1], self.split_unit
        if group is not None and (start % group or (stop % group and stop != in_features)):
            raise ConfigError(
                "tensor_parallel_size",
                f"a rank would hold the inputs {start} to {stop - 1} of {name}, but its {self.name} weights "
                f"have one scale for each {group} inputs: use another number of ranks",
            )
        selected = {}
        for key, tensor in tensors.items():
            size = None if tensor.dim() == 1 else self.inputs_per_number(key)
            selected[key] = tensor if size is None else tensor[:, start // size : -(-stop // size)]
        return selected

    def inputs_per_number(self, key: str) -> int | None:
        """Return how many inputs share one number of the tensor ``key [out, n]`` of `pack`.

        None if all inputs of an output share one number.
        """
        return 1 if key == "weight" else self.group_size

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

    Float encodings come first. Encodings of each kind are sorted by decreasing number of bits. Encodings that
    `extended` adds come last.

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
        """The encodings that a user can choose for a whole model."""
        return tuple(name for name, encoding in self.items() if not encoding.is_internal)

    @property
    def float_names(self) -> tuple[str, ...]:
        """The encodings whose weights are plain floats, such as bfloat16."""
        return tuple(name for name, encoding in self.items() if encoding.is_float)

    @contextmanager
    def extended(self, *encodings: LinearEncoding) -> Iterator[None]:
        """Add encodings within a ``with`` block, in this process only."""
        before = self._added
        self._added = {**before, **{encoding.name: encoding for encoding in encodings}}
        try:
            yield
        finally:
            self._added = before

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
        ConfigError: no encoding has this name; the message lists those that a user can choose.
    """
    try:
        return ENCODINGS[name]
    except KeyError:
        known = ", ".join(ENCODINGS.names)
        raise ConfigError("quantization_encoding", f"unknown encoding {name!r}: use one of {known}") from None


def _load_encoding(module: ModuleType) -> LinearEncoding:
    record, name = getattr(module, "ENCODING", None), module.__name__.rpartition(".")[2]
    if not isinstance(record, LinearEncoding):
        raise ConfigError("quantization_encoding", f"{module.__file__} must hold ENCODING, a LinearEncoding")
    if record.name != name:
        raise ConfigError(
            "quantization_encoding",
            f"{module.__file__} holds the encoding {record.name!r}: its file must be {record.name}.py",
        )
    return record
