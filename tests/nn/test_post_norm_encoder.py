"""Loading of post-norm encoders: precision of the norms, and splitting of large weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tensor_sources import FloatTensors, random_tensor
from torch import Tensor

from penstock.nn import EncoderNames, Loader, PostNormEncoder, PostNormSizes

SIZES = PostNormSizes(
    vocab_size=20,
    positions=16,
    token_types=2,
    layers=2,
    hidden=16,
    inner=48,
    heads=2,
    norm_eps=1e-12,
    activation="gelu",
)


class RandomTensors(FloatTensors):
    """Random tensors of any name. The down projections of feed-forward layers have one large weight."""

    def __init__(self) -> None:
        super().__init__({})

    def __contains__(self, name: str) -> bool:
        return True

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.tensors:
            self.tensors[name] = random_tensor(*shape, seed=len(self.tensors))
            if shape == (SIZES.hidden, SIZES.inner):
                self.tensors[name][3, 5] = 50.0
        return self.tensors[name]


def load_network(source: Any, encoding: str) -> PostNormEncoder:
    loader = Loader(source, encoding, torch.device("cpu"))
    return PostNormEncoder.load(loader, SIZES, EncoderNames(), max_length=16)


@pytest.mark.parametrize("encoding", ["bfloat16", "int8"])
def test_norms_keep_the_precision_of_the_checkpoint(encoding: str) -> None:
    """Rounding norms to bfloat16 causes a larger error than all other roundings of a bfloat16 model."""
    source = RandomTensors()
    loaded_network = load_network(source, encoding)
    norms = {"embeddings.LayerNorm": loaded_network.norm}
    for i, block in enumerate(loaded_network.blocks):
        norms[f"encoder.layer.{i}.attention.output.LayerNorm"] = block.attention_norm
        norms[f"encoder.layer.{i}.output.LayerNorm"] = block.mlp_norm
    for name, norm in norms.items():
        assert torch.equal(norm.weight, source.tensors[f"{name}.weight"])
        assert torch.equal(norm.bias, source.tensors[f"{name}.bias"])


def test_inputs_of_large_weights_are_repeated_in_int8_only() -> None:
    down_inputs = {
        encoding: {
            block.mlp.down.packed.in_features for block in load_network(RandomTensors(), encoding).blocks
        }
        for encoding in ("int8", "bfloat16", "float32")
    }
    assert down_inputs == {"int8": {SIZES.inner + 2}, "bfloat16": {SIZES.inner}, "float32": {SIZES.inner}}
