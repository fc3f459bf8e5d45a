"""Decoder families in the encodings of float checkpoints: errors, sizes, and the encoding of each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import DECODERS, make_tiny_config, write_checkpoint
from support.networks import modules_and_weights, weight_bytes
from support.pipeline_steps import generate_tokens, make_context, open_pipeline, random_tokens, step_logits

from penstock.kernels import PackedExperts, PackedLinear
from penstock.kernels.encodings import int4
from penstock.nn import Attention, Linear, LinearAttention, SharedExperts
from penstock.pipelines import TextGenerationPipeline

pytestmark = pytest.mark.models

PROMPT = random_tokens(30, 130, seed=7)
_SCALED_KEYS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "n_embd", "n_inner", "head_dim")
MAX_ERROR = {"bfloat16": 0.05, "int8": 0.12, "int5": 0.25, "int4": 0.5}
"""Maximum error of the logits against float32, relative to the norm of the logits.

``int4`` and ``int5`` are two cases of the encoding int4. In the case ``int4`` no layer counts as narrow. In
the case ``int5`` layers count as narrow and are stored in 5 bits.
"""

ERROR_FACTORS = {
    **dict.fromkeys(("gemma4_text", "llama4_text", "qwen3_5_text"), 2),
    **dict.fromkeys(("phimoe", "qwen3_5_moe_text", "qwen3_next"), 3),
}
"""Factors on the maximum error of some families.

A rounding error can route a row to another expert. Norms enlarge errors of small outputs.
"""


def wide_config(tiny_config: dict[str, Any]) -> dict[str, Any]:
    """Return a family's tiny configuration with layers that are wide enough for 4-bit groups."""
    wide_values = {
        key: 4 * value if key in _SCALED_KEYS and value else value for key, value in tiny_config.items()
    }
    return wide_values | (
        {"query_pre_attn_scalar": wide_values["head_dim"]} if "query_pre_attn_scalar" in wide_values else {}
    )


@pytest.fixture(scope="module", params=DECODERS, ids=lambda architecture: architecture.name)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encodings")
    write_checkpoint(folder, wide_config(request.param.tiny_config()))
    tensors = load_file(folder / "model.safetensors")
    # With larger weights, rounding errors would grow from layer to layer.
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and not any(substring in name for substring in ("embed", "wte", "wpe", "_bias")):
            tensor *= 0.35
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def open_with_encoding(
    checkpoint: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> TextGenerationPipeline:
    if encoding == "int4":
        # Treats no layer as narrow, so no layer gets 5 bits.
        monkeypatch.setattr(int4, "NARROW_LAYER_SIZE", 0)
    encoding = "int4" if encoding == "int5" else encoding
    return open_pipeline(checkpoint, quantization_encoding=encoding, num_threads=1)


@pytest.fixture(scope="module")
def float32_logits(checkpoint: Path) -> torch.Tensor:  # [T, V]
    return step_logits(open_pipeline(checkpoint, num_threads=1), [make_context(PROMPT)])[0]


@pytest.mark.matrix(strength=1, times=2)
@pytest.mark.parametrize("encoding", MAX_ERROR)
def test_logits_are_close_to_float32(
    checkpoint: Path, float32_logits: torch.Tensor, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = open_with_encoding(checkpoint, encoding, monkeypatch)
    logits = step_logits(pipeline, [make_context(PROMPT)])[0]
    error = float((logits - float32_logits).norm() / float32_logits.norm())
    assert (
        0
        < error
        < MAX_ERROR[encoding] * ERROR_FACTORS.get(str(pipeline.model.huggingface_config.model_type), 1)
    )
    assert len(generate_tokens(pipeline, [make_context(PROMPT, 5)])[0]) == 5


def allowed_estimate_ratios(pipeline: TextGenerationPipeline) -> tuple[float, float]:
    """Return the smallest and the largest allowed ratio of estimated to actual bytes of the weights.

    The estimate includes the padding of panels. A back end without panels, such as the CUDA back end, does
    not store this padding. The estimate does not include that norm weights ``1 + w`` are stored in float32.
    """
    return (0.99, 1.2) if pipeline.session.ops.packs_weights else (0.98, 1.25)


@pytest.mark.matrix(strength=1, times=2)
@pytest.mark.parametrize("encoding", ["float32", *MAX_ERROR])
def test_the_weights_have_the_estimated_size(
    checkpoint: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = open_with_encoding(checkpoint, encoding, monkeypatch)
    loaded_bytes = weight_bytes(pipeline)
    estimated_bytes = pipeline.model.estimate_weights_size(pipeline.model.pipeline_config)
    min_ratio, max_ratio = allowed_estimate_ratios(pipeline)
    assert min_ratio * loaded_bytes <= estimated_bytes <= max_ratio * loaded_bytes, (
        "each part of a fused layer may start a new panel"
    )


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_narrow_experts_of_a_wide_model_are_stored_in_4_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 64, "moe_intermediate_size": 64}
    checkpoint = write_checkpoint(tmp_path, make_tiny_config(name) | sizes)
    monkeypatch.setattr(int4, "NARROW_LAYER_SIZE", 192)
    pipeline = open_pipeline(checkpoint, quantization_encoding="int4", num_threads=1)
    model: Any = pipeline.model
    experts = [module for module in modules_and_weights(model.network) if isinstance(module, PackedExperts)]
    assert {linear.encoding for layer in experts for linear in (*layer.gate_up, *layer.down)} == {"int4"}
    loaded_bytes, estimated_bytes = weight_bytes(pipeline), model.estimate_weights_size(model.pipeline_config)
    min_ratio, max_ratio = allowed_estimate_ratios(pipeline)
    assert min_ratio * loaded_bytes <= estimated_bytes <= max_ratio * loaded_bytes


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("encoding", ["int5", "int4"])
def test_each_kind_of_layer_has_its_encoding(
    checkpoint: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = open_with_encoding(checkpoint, encoding, monkeypatch)
    model: Any = pipeline.model
    network = model.network
    modules = list(modules_and_weights(network))
    routers = [
        id(module.router.packed) for module in modules if isinstance(getattr(module, "router", None), Linear)
    ]
    shared_experts = [module for module in modules if isinstance(module, SharedExperts)]
    routers += [id(layer.gate.packed) for layer in shared_experts if layer.gate is not None]
    routers += [id(module.gates.packed) for module in modules if isinstance(module, LinearAttention)]
    linears = [module for module in modules if isinstance(module, PackedLinear)]
    attentions = [module for module in modules if isinstance(module, Attention)]
    values = [id(attention.values.packed) for attention in attentions if attention.values is not None]
    assert len(values) == sum(name.endswith("self_attn.v_proj.weight") for name in model.weights.names)
    assert network.head.linear.packed.encoding == "int8"
    for packed_weight in linears:
        if id(packed_weight) in routers:
            assert packed_weight.encoding in ("bfloat16", "float32")
        elif packed_weight is not network.head.linear.packed:
            is_small = min(packed_weight.in_features, packed_weight.out_features) < 64
            assert packed_weight.encoding == ("int8" if is_small or id(packed_weight) in values else encoding)
    assert encoding in {packed_weight.encoding for packed_weight in linears}
