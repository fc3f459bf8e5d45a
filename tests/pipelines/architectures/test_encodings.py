"""Every family in every encoding: close to float32, the more bits the closer, and of the size foretold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_checkpoint
from support.running import context_of, generate, open_pipeline, random_tokens, step_logits

from penstock.kernels import PackedLinear
from penstock.nn import Attention, Experts, Rotary
from penstock.pipelines import PIPELINE_REGISTRY, TextGenerationPipeline
from penstock.pipelines.memory import estimate_weights_size

PROMPT = random_tokens(30, 130, seed=7)
_WIDER = ("hidden_size", "intermediate_size", "moe_intermediate_size", "n_embd", "n_inner", "head_dim")
FARTHEST = {"bfloat16": 0.05, "int8": 0.12, "int4": 0.5}
"""The error of logits against float32, as a share of their size."""


def wide_config(tiny: dict[str, Any]) -> dict[str, Any]:
    """A family's tiny configuration, made wide enough for 4 bits."""
    wide = {key: 4 * value if key in _WIDER and value else value for key, value in tiny.items()}
    return wide | ({"query_pre_attn_scalar": wide["head_dim"]} if "query_pre_attn_scalar" in wide else {})


@pytest.fixture(
    scope="module", params=PIPELINE_REGISTRY.architectures, ids=lambda architecture: architecture.name
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encodings")
    write_checkpoint(folder, wide_config(request.param.tiny_config()))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():  # of a size at which errors do not grow from layer to layer
        if tensor.dim() > 1 and not any(part in name for part in ("embed", "wte", "wpe", "_bias")):
            tensor *= 0.35
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> torch.Tensor:  # [T, V]
    return step_logits(open_pipeline(checkpoint, num_threads=1), [context_of(PROMPT)])[0]


@pytest.mark.parametrize("encoding", FARTHEST)
def test_close_to_float32(checkpoint: Path, exact: torch.Tensor, encoding: str) -> None:
    pipeline = open_pipeline(checkpoint, quantization_encoding=encoding, num_threads=1)
    logits = step_logits(pipeline, [context_of(PROMPT)])[0]
    error = float((logits - exact).norm() / exact.norm())
    assert 0 < error < FARTHEST[encoding]
    assert len(generate(pipeline, [context_of(PROMPT, 5)])[0]) == 5


@pytest.mark.parametrize("encoding", ["float32", *FARTHEST])
def test_the_size_foretold(checkpoint: Path, encoding: str) -> None:
    pipeline = open_pipeline(checkpoint, quantization_encoding=encoding, num_threads=1)
    held = held_bytes(pipeline)
    foretold = estimate_weights_size(pipeline.model.pipeline_config)
    assert 0.995 * held <= foretold <= 1.15 * held, "each part of a fused layer may fill a panel of its own"


def test_which_layers_are_in_which_encoding(checkpoint: Path) -> None:
    pipeline = open_pipeline(checkpoint, quantization_encoding="int4", num_threads=1)
    model: Any = pipeline.model
    network = model.network
    routers = [id(one.router.packed) for one in parts_of(network) if isinstance(one, Experts)]
    linears = [one for one in parts_of(network) if isinstance(one, PackedLinear)]
    attentions = [one for one in parts_of(network) if isinstance(one, Attention)]
    values = [id(one.values.packed) for one in attentions if one.values is not None]
    is_apart = f"{attentions[0].layer}.self_attn.v_proj" in " ".join(model.weights.names)
    assert len(values) == (len(attentions) if is_apart else 0)
    assert network.head.linear.packed.encoding == "int8"
    for packed in linears:
        if id(packed) in routers:
            assert packed.encoding == "bfloat16"
        elif packed is not network.head.linear.packed:
            is_small = min(packed.in_features, packed.out_features) < 64
            assert packed.encoding == ("int8" if is_small or id(packed) in values else "int4")
    assert "int4" in {packed.encoding for packed in linears}


def held_bytes(pipeline: TextGenerationPipeline) -> int:
    """What the weights of a network take; those that share their memory count once."""
    model: Any = pipeline.model
    tensors = [one for one in parts_of(model.network) if isinstance(one, torch.Tensor)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def parts_of(one: Any) -> Iterator[Any]:
    """A network, its layers, their weights; not the tables of its rotary embedding, which are no weights."""
    yield one
    if is_dataclass(one) and not isinstance(one, Rotary):
        children = [getattr(one, each.name) for each in fields(one)]
    elif isinstance(one, Mapping):
        children = list(one.values())
    else:
        children = list(one) if isinstance(one, tuple | list) else []
    for child in children:
        yield from parts_of(child)
