"""Large weights of feed-forward layers are divided among repeated inputs, to reduce the int8 error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.tensor_sources import FloatTensors, random_tensor
from torch import Tensor

from penstock.distributed import Shard
from penstock.kernels import ENCODINGS, StepInputs
from penstock.kernels.reference import ReferenceOps
from penstock.nn import MLP, GatedMLP, Loader
from penstock.nn.outlier_splitting import load_split_mlp, repeated_inputs, with_repeated_inputs

HIDDEN, INNER = 40, 96
OUTLIERS = ((3, 50), (7, 50), (7, 11))
"""Rows and columns of the large weights of `weight_with_outliers`."""


class EncodedTensors(FloatTensors):
    """Tensors that a checkpoint stores in an encoding, or as floats if ``encoding`` is None."""

    def __init__(self, tensors: Mapping[str, Tensor], encoding: str | None = None) -> None:
        super().__init__(tensors)
        self._encoding = encoding

    def stored_encoding(self, name: str) -> str | None:
        return self._encoding


def weight_with_outliers() -> Tensor:
    """Return random weights ``[HIDDEN, INNER]``, three of them set to 40."""
    weight = random_tensor(HIDDEN, INNER)
    for row, column in OUTLIERS:
        weight[row, column] = 40.0
    return weight


def max_row_errors(weight: Tensor) -> Tensor:
    """Return the maximum int8 error of each row."""
    encoding = ENCODINGS["int8"]
    return (encoding.unpack(encoding.pack(weight)) - weight).abs().amax(1)


def test_the_inputs_of_large_weights_are_repeated() -> None:
    repeated_indices = repeated_inputs(weight_with_outliers(), 8).tolist()
    assert len(repeated_indices) == 8
    assert repeated_indices.count(50) >= 2  # input 50 has two large weights
    assert 11 in repeated_indices  # repeating input 11 helps only after input 50 is repeated


@pytest.mark.parametrize("value", [None, 0.0, float("nan"), float("inf")])
def test_weights_without_outliers_have_no_repeated_inputs(value: float | None) -> None:
    weight = random_tensor(400, 200)
    if value is not None:
        weight = torch.full_like(weight, value)
    assert repeated_inputs(weight, 8).numel() == 0


def test_copies_add_up_to_the_weight_and_reduce_the_int8_error() -> None:
    weight = weight_with_outliers()
    repeated_indices = repeated_inputs(weight, 8)
    repeated_weight = with_repeated_inputs(weight, repeated_indices)
    assert repeated_weight.shape == (HIDDEN, INNER + 8)
    added_weight = repeated_weight[:, :INNER].index_add(1, repeated_indices, repeated_weight[:, INNER:])
    torch.testing.assert_close(added_weight, weight, atol=1e-5, rtol=0)
    encoding = ENCODINGS["int8"]
    stored_weight = encoding.unpack(encoding.pack(repeated_weight))
    added_int8_weight = stored_weight[:, :INNER].index_add(1, repeated_indices, stored_weight[:, INNER:])
    row_errors = (added_int8_weight - weight).abs().amax(1)
    for row in {row for row, _ in OUTLIERS}:
        # Halving a large weight halves the scale of its row.
        assert row_errors[row] < 0.55 * max_row_errors(weight)[row]


def make_tensors(is_gated: bool) -> dict[str, Tensor]:
    weights = {"down.weight": weight_with_outliers(), "down.bias": random_tensor(HIDDEN, seed=1)}
    for seed, name in enumerate(("gate", "up")[not is_gated :]):
        weights |= {f"{name}.weight": random_tensor(INNER, HIDDEN, seed=2 + seed) / 6}
        weights |= {f"{name}.bias": random_tensor(INNER, seed=4 + seed)}
    return weights


def load_split_layer(source: Any, is_gated: bool, encoding: str = "int8", **options: Any) -> Any:
    loader = Loader(source, encoding, torch.device("cpu"), **options)
    names = [(name, INNER) for name in ("gate", "up")[not is_gated :]]
    return load_split_mlp(loader, names, "down", (HIDDEN, INNER), up_bias=True, down_bias=True)


def run_layers(layers: Any, is_gated: bool) -> Tensor:
    x = random_tensor(9, HIDDEN, seed=9)
    step = StepInputs(ReferenceOps(), torch.arange(9), torch.tensor([0, 9], dtype=torch.int32))
    return (GatedMLP if is_gated else MLP)(*layers, "gelu")(x, step)


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_split_layer_computes_the_function_of_the_unsplit_layer(
    is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source: Any = EncodedTensors(make_tensors(is_gated))
    names = ("gate", "up")[not is_gated :]
    monkeypatch.setattr(type(ENCODINGS["float32"]), "max_repeated_inputs", 4)
    layers = load_split_layer(source, is_gated, "float32")
    assert [layer.packed.in_features for layer in layers] == [HIDDEN, INNER + 4]
    assert layers[0].packed.out_features == len(names) * (INNER + 4)
    weights = make_tensors(is_gated)
    x = random_tensor(9, HIDDEN, seed=9)
    hidden = torch.nn.functional.gelu(x @ weights[f"{names[0]}.weight"].T + weights[f"{names[0]}.bias"])
    if is_gated:
        hidden = hidden * (x @ weights["up.weight"].T + weights["up.bias"])
    expected = hidden @ weights["down.weight"].T + weights["down.bias"]
    torch.testing.assert_close(run_layers(layers, is_gated), expected, atol=2e-4, rtol=0)


def test_layers_of_fixed_size_bfloat16_layers_and_stored_int8_layers_are_not_split() -> None:
    source: Any = EncodedTensors(make_tensors(is_gated=False))
    assert load_split_layer(source, is_gated=False) is not None
    other_options: list[dict[str, Any]] = [
        {"keep_stored": True},
        {"is_uniform": True},
        {"has_adapters": True},
        {"shard": Shard(0, 2)},
    ]
    for options in other_options:
        assert load_split_layer(source, is_gated=False, **options) is None, options
    assert load_split_layer(source, is_gated=False, encoding="bfloat16") is None
    quantized_source: Any = EncodedTensors(make_tensors(is_gated=False), "int8")
    assert load_split_layer(quantized_source, is_gated=False) is None
