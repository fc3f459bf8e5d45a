"""Poolings compared with their formulas, and dense modules compared with torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import CheckpointError, WeightsError
from penstock.kernels.reference import ReferenceOps
from penstock.pipelines.pooling import load_dense, pool
from penstock.text.sentence_transformers import DenseModule

HIDDEN = torch.tensor([[1.0, -2.0], [4.0, 8.0], [3.0, 1.0]])
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("pooling", "expected", "expected_without_first"),
    [
        ("cls", [1, -2], [4, 8]),
        ("mean", [8 / 3, 7 / 3], [3.5, 4.5]),
        ("max", [4, 8], [4, 8]),
        ("mean_sqrt_len", [8 / 3**0.5, 7 / 3**0.5], [7 / 2**0.5, 9 / 2**0.5]),
        ("weighted_mean", [(1 + 8 + 9) / 6, (-2 + 16 + 3) / 6], [(8 + 9) / 5, (16 + 3) / 5]),
        ("last_token", [3, 1], [3, 1]),
    ],
)
def test_pooling_equals_its_formula(
    pooling: str, expected: list[float], expected_without_first: list[float]
) -> None:
    assert pool(HIDDEN, (pooling,)).tolist() == pytest.approx(expected)  # type: ignore[arg-type]
    assert pool(HIDDEN, (pooling,), 1).tolist() == pytest.approx(expected_without_first)  # type: ignore[arg-type]


def test_several_poolings_are_concatenated_in_float32() -> None:
    pooled_vector = pool(HIDDEN.bfloat16(), ("cls", "max"))
    assert pooled_vector.dtype is torch.float32
    assert pooled_vector.tolist() == [1, -2, 4, 8]


def make_dense_module(
    folder: Path, activation: str = "Tanh", bias: bool = True, out_features: int = 3
) -> DenseModule:
    return DenseModule(
        path=folder, in_features=2, out_features=out_features, bias=bias, activation=activation
    )


def test_a_dense_module_saved_by_torch_is_read(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 3)
    torch.save(
        {f"linear.{name}": tensor for name, tensor in linear.state_dict().items()},
        tmp_path / "pytorch_model.bin",
    )
    ops = ReferenceOps()
    expected = linear(HIDDEN).tanh().detach()
    np.testing.assert_allclose(
        load_dense(make_dense_module(tmp_path), ops, CPU)(HIDDEN, ops), expected, atol=1e-6
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"])
def test_a_dense_module_equals_torch(tmp_path: Path, activation: str, bias: bool) -> None:
    linear = torch.nn.Linear(2, 3, bias=bias)
    save_file(
        {f"linear.{name}": parameter.detach() for name, parameter in linear.named_parameters()},
        tmp_path / "model.safetensors",
    )
    ops = ReferenceOps()
    layer = load_dense(make_dense_module(tmp_path, activation, bias), ops, CPU)
    expected = getattr(torch.nn, activation)()(linear(HIDDEN)).detach()
    np.testing.assert_allclose(layer(HIDDEN, ops), expected, atol=1e-6)


def test_malformed_dense_modules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="activation 'Softmax' is not supported: use one of Identity"):
        load_dense(make_dense_module(tmp_path, "Softmax"), ReferenceOps(), CPU)
    save_file({"linear.weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"linear\.bias"):
        load_dense(make_dense_module(tmp_path), ReferenceOps(), CPU)
    with pytest.raises(WeightsError, match=r"linear\.weight"):
        load_dense(make_dense_module(tmp_path, bias=False, out_features=4), ReferenceOps(), CPU)
