"""The loader: encodings, fused layers, released weights, files of packed weights, and lazy packing."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from support.tensor_sources import FloatTensors, random_tensor
from torch import Tensor

from penstock.driver import CPU
from penstock.engine import InferenceSession
from penstock.kernels import ENCODINGS, LazyWeight, Ops, PackedLinear, unpack_linear
from penstock.kernels.cpu import available_isas
from penstock.kernels.reference import ReferenceOps
from penstock.nn import Loader

needs_kernels = pytest.mark.skipif(not available_isas(), reason="the C++ kernels are not built")
BACK_ENDS = {"reference": ReferenceOps(), "best": InferenceSession([CPU()]).ops}


class QuantizedTensors(FloatTensors):
    """Named tensors, some of them quantized."""

    def __init__(
        self, tensors: Mapping[str, Tensor], quantized_names: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(tensors)
        self.quantized = quantized_names or {}
        self.released: list[str] = []
        self.mapped: set[str] = set()
        self.expected: dict[str, tuple[int, ...]] = {}
        self.orders: dict[str, bytes] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert name not in self.released, (
            "the loader must not read a released weight: its pages would be loaded again"
        )
        return super().tensor(name, shape)

    def expect(self, name: str, shape: tuple[int, ...]) -> bool:
        self.expected[name] = shape
        return True

    def stored_encoding(self, name: str) -> str | None:
        return self.quantized.get(name)

    def input_order(self, name: str) -> bytes:
        return self.orders.get(name, b"")

    def read_linear(
        self, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        encoding = self.quantized[name]
        rows = ENCODINGS[encoding].pack(self.tensors[name])
        # Packing does not double the scales, so a test detects whether the loader packs the weight again.
        return encoding, rows | {"scales": 2 * rows["scales"]}

    def rows(
        self, name: str, shape: tuple[int, int], start: int, stop: int
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        if name not in self.quantized:
            return None, {"weight": self.tensor(name, shape)[start:stop]}
        encoding, tensors = self.read_linear(name, shape)
        return encoding, {key: tensor[start:stop] for key, tensor in tensors.items()}

    def is_mapped(self, name: str) -> bool:
        return name in self.mapped

    def release(self, name: str) -> None:
        self.released.append(name)


def load(source: QuantizedTensors, encoding: str, ops: Ops) -> Loader:
    return Loader(source, encoding, torch.device("cpu"), ops)


@pytest.mark.parametrize(
    ("encoding", "shape", "expected"),
    [
        ("int4", (2048, 2048), "int4"),
        ("int4", (4096, 2047), "int5"),
        ("int4", (2047, 4096), "int5"),
        ("int4", (64, 64), "int5"),
        ("int4", (63, 640), "int8"),
        ("int4", (640, 63), "int8"),
        ("int5", (640, 63), "int5"),
        ("int8", (8, 8), "int8"),
        ("bfloat16", (8, 8), "bfloat16"),
    ],
)
def test_small_layers_of_int4_models_are_stored_in_more_bits(
    encoding: str, shape: tuple[int, int], expected: str
) -> None:
    assert ENCODINGS[encoding].for_layer("linear", *shape) == expected


def test_an_expert_uses_int5_only_if_both_dimensions_are_small() -> None:
    """A model with many narrow experts is large, so its experts are stored in 4 bits."""
    sizes = {(768, 2048): "int4", (2048, 768): "int4", (1024, 2047): "int5", (63, 4096): "int8"}
    encodings = {size: ENCODINGS["int4"].for_layer("expert", *size) for size in sizes}
    assert encodings == sizes


def test_the_head_of_quantized_models_is_int8_except_in_int5() -> None:
    heads = {name: encoding.for_layer("head", 4096, 4096) for name, encoding in ENCODINGS.items()}
    quantized_names = [
        name for name, encoding in ENCODINGS.items() if not encoding.is_float and name not in ("int8", "int5")
    ]
    assert {heads.pop(name) for name in quantized_names} == {"int8"}
    assert all(head == encoding for encoding, head in heads.items())


def test_value_projections_are_int8_in_int4_models_unless_they_are_stored_in_int4() -> None:
    tensors = {"x.v_proj.weight": random_tensor(64, 96)}
    value_encodings = {
        encoding: load(QuantizedTensors(tensors), encoding, BACK_ENDS["best"]).has_separate_values(
            "x.v_proj", 64, 96, fused_with="x.q_proj"
        )
        for encoding in ENCODINGS
    }
    assert value_encodings.pop("int4")
    assert not any(value_encodings.values())
    quantized_source = QuantizedTensors(tensors, {"x.v_proj.weight": "int4"})
    assert not load(quantized_source, "int4", BACK_ENDS["best"]).has_separate_values(
        "x.v_proj", 64, 96, fused_with="x.q_proj"
    )
    assert (
        load(QuantizedTensors(tensors), "int4", BACK_ENDS["best"]).values("x.v_proj", 64, 96).packed.encoding
        == "int8"
    )


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("sizes", [(128, 64, 70), (96, 32, 64), (64,)], ids=str)
def test_fused_parts_are_packed_like_the_whole_matrix(
    back_end: str, encoding: str, sizes: tuple[int, ...]
) -> None:
    slice_sizes = {f"part{i}": size for i, size in enumerate(sizes)}
    tensors = {f"x.{name}.weight": random_tensor(size, 80, seed=size) for name, size in slice_sizes.items()}
    biases = {f"x.{name}.bias": random_tensor(size) for name, size in slice_sizes.items()}
    source = QuantizedTensors(tensors | biases)
    packed_weight = load(source, encoding, BACK_ENDS[back_end]).fused("x", slice_sizes, 80, bias=True).packed
    full_matrix = torch.cat(list(tensors.values()))
    weight_encoding = ENCODINGS[packed_weight.encoding]
    assert torch.equal(
        unpack_linear(packed_weight), weight_encoding.unpack(weight_encoding.pack(full_matrix))
    )
    assert packed_weight.bias is not None
    assert torch.equal(
        packed_weight.bias, torch.cat(list(biases.values())).to(weight_encoding.compute_dtype.to_torch())
    )
    assert [
        (layer_slice.name, layer_slice.stop - layer_slice.start) for layer_slice in packed_weight.slices
    ] == [(f"x.{name}", size) for name, size in slice_sizes.items()]
    assert source.released == list(tensors)


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_float16_bfloat16_and_float64_weights_are_loaded(back_end: str, dtype: torch.dtype) -> None:
    weight = random_tensor(70, 96).to(dtype)
    for encoding in ("float32", "bfloat16", "int8", "int4"):
        packed_weight = (
            load(QuantizedTensors({"x.weight": weight}), encoding, BACK_ENDS[back_end])
            .linear("x", 70, 96)
            .packed
        )
        weight_encoding = ENCODINGS[packed_weight.encoding]
        assert torch.equal(unpack_linear(packed_weight), weight_encoding.unpack(weight_encoding.pack(weight)))


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_transposed_weight_is_loaded(back_end: str) -> None:
    weight = random_tensor(96, 70)
    packed_weight = load(QuantizedTensors({"x.weight": weight}), "int8", BACK_ENDS[back_end]).linear(
        "x", 70, 96, transposed=True
    )
    weight_encoding = ENCODINGS["int8"]
    assert torch.equal(
        unpack_linear(packed_weight.packed), weight_encoding.unpack(weight_encoding.pack(weight.T))
    )


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_quantized_rows_are_kept_unchanged(back_end: str, encoding: str) -> None:
    """One part of the fused layer is quantized in the checkpoint. The loader quantizes the other part."""
    tensors = {f"x.{name}.weight": random_tensor(64, 80, seed=i) for i, name in enumerate("ab")}
    source = QuantizedTensors(tensors, {"x.a.weight": encoding})
    packed_weight = load(source, encoding, BACK_ENDS[back_end]).fused("x", {"a": 64, "b": 64}, 80).packed
    assert packed_weight.encoding == encoding
    stored_part, quantized_part = unpack_linear(packed_weight).split(64)
    weight_encoding = ENCODINGS[encoding]
    assert torch.equal(stored_part, 2 * weight_encoding.unpack(weight_encoding.pack(tensors["x.a.weight"])))
    assert torch.equal(quantized_part, weight_encoding.unpack(weight_encoding.pack(tensors["x.b.weight"])))
    assert source.released == list(tensors)


def test_an_unquantized_layer_stays_in_bfloat16() -> None:
    loader = load(QuantizedTensors({}), "int4", ReferenceOps())
    assert loader.pack(random_tensor(64, 64), {"gate": 64}, is_unquantized=True).packed.encoding == "bfloat16"
    assert loader.pack(random_tensor(64, 64), {"up": 64}).packed.encoding == "int5"
    assert list(loader.linears) == ["gate", "up"]


class PackedLayerStore:
    """A file of packed weights, which returns its layers in load order."""

    def __init__(self, layers: list[PackedLinear]) -> None:
        self.layers = layers

    def take(self, *_: object) -> PackedLinear:
        return self.layers.pop(0)


def test_weights_in_a_file_of_packed_weights_are_not_read_from_the_checkpoint() -> None:
    """Reading a weight may dequantize it, which would take longer than the rest of the load."""

    def load_layers(loader: Loader) -> list[PackedLinear]:
        loader.linear("x", 70, 96, transposed=True)
        loader.fused("y", {"a": 64, "b": 32}, 80, bias=True)
        loader.head("z", 40, 96)
        return loader.layers

    shapes = {"x.weight": (96, 70), "y.a.weight": (64, 80), "y.b.weight": (32, 80), "z.weight": (40, 96)}
    biases = {"y.a.bias": random_tensor(64), "y.b.bias": random_tensor(32)}
    complete_source = QuantizedTensors(
        {name: random_tensor(*shape) for name, shape in shapes.items()} | biases
    )
    layers = load_layers(load(complete_source, "int8", ReferenceOps()))
    assert not complete_source.expected
    source = QuantizedTensors(biases)  # has no weights, so reading one would fail
    loader = Loader(source, "int8", torch.device("cpu"), load_packed=PackedLayerStore([*layers]).take)
    assert all(cached_layer is layer for cached_layer, layer in zip(load_layers(loader), layers, strict=True))
    assert source.expected == shapes
    assert list(loader.linears) == ["x", "y.a", "y.b", "z"]


def load_lazily(source: QuantizedTensors, encoding: str) -> Loader:
    return Loader(source, encoding, torch.device("cpu"), BACK_ENDS["best"], lazy="all")


def is_pending(packed: PackedLinear) -> bool:
    return isinstance(packed.tensors, LazyWeight) and bool(packed.tensors.parts)


@needs_kernels
@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int4"])
def test_memory_mapped_floats_are_packed_at_first_use_if_the_encoding_packs_lazily(encoding: str) -> None:
    slice_sizes = {"a": 128, "b": 64, "c": 70}
    source = QuantizedTensors(
        {f"x.{name}.weight": random_tensor(size, 80, seed=size) for name, size in slice_sizes.items()}
    )
    source.mapped = set(source.tensors)
    packed_weight = load_lazily(source, encoding).fused("x", slice_sizes, 80).packed
    assert is_pending(packed_weight) == ENCODINGS[encoding].packs_lazily
    assert source.released == ([] if is_pending(packed_weight) else list(source.tensors))
    weight_encoding = ENCODINGS[packed_weight.encoding]
    if isinstance(packed_weight.tensors, LazyWeight):
        assert packed_weight.tensors.num_bytes == weight_encoding.num_bytes(262, 80)
    assert torch.equal(
        unpack_linear(packed_weight),
        weight_encoding.unpack(weight_encoding.pack(torch.cat(list(source.tensors.values())))),
    )
    assert not is_pending(packed_weight)
    assert source.released == list(source.tensors)


@needs_kernels
def test_weights_are_packed_at_once_if_not_memory_mapped_or_without_lazy_loading() -> None:
    source = QuantizedTensors(
        {
            "widened.weight": random_tensor(64, 80),
            "plain.weight": random_tensor(64, 80),
        }
    )
    source.mapped = set(source.tensors) - {"widened.weight"}
    loader = load_lazily(source, "bfloat16")
    assert not is_pending(loader.linear("widened", 64, 80).packed)
    assert is_pending(loader.linear("plain", 64, 80).packed)
    eager_loader = load(source, "bfloat16", BACK_ENDS["best"])
    assert not is_pending(eager_loader.linear("plain", 64, 80).packed), "lazy loading was not requested"


@needs_kernels
def test_a_tied_head_is_packed_lazily_with_its_table() -> None:
    table = random_tensor(130, 80).bfloat16()
    packed_weight = (
        load_lazily(QuantizedTensors({}), "bfloat16").head("lm_head", 130, 80, tied_to=table).packed
    )
    assert is_pending(packed_weight)
    assert torch.equal(unpack_linear(packed_weight), table)


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_head_in_the_file_takes_precedence_over_the_table(encoding: str, back_end: str) -> None:
    table, head_weight = random_tensor(200, 80).bfloat16(), random_tensor(200, 80, seed=1).bfloat16()
    source = QuantizedTensors({"lm_head.weight": head_weight})
    source.mapped = set(source.tensors)
    packed_weight = load(source, encoding, BACK_ENDS[back_end]).head("lm_head", 200, 80, tied_to=table).packed
    weight_encoding = ENCODINGS[packed_weight.encoding]
    assert torch.equal(
        unpack_linear(packed_weight), weight_encoding.unpack(weight_encoding.pack(head_weight))
    )
    assert source.released == ["lm_head.weight"]
