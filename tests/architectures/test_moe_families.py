"""Eight families with experts: variants of configurations, mutations, bfloat16, refused settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import DECODERS, load_in_transformers, transformers_logits, write_checkpoint
from support.pipeline_steps import append_token, make_context, open_pipeline, random_tokens, step_logits

from penstock.architectures.llama4_text.model import Llama4Experts
from penstock.errors import ConfigError
from penstock.kernels import ScoreRouting
from penstock.nn import Experts, SharedExperts
from penstock.pipelines import TextGenerationPipeline

pytestmark = pytest.mark.models

TINY_CONFIGS = {
    candidate.name: candidate.tiny_config for candidate in DECODERS if candidate.tiny_config is not None
}
TOKENS = random_tokens(60, 130, seed=5)
FAMILIES = ("qwen2_moe", "olmoe", "granitemoe", "glm4_moe", "minimax_m2")
FAMILIES += ("ernie4_5_moe", "phimoe", "llama4_text")
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 5.0, 7.5],
    "short_mscale": 1.24,
    "long_mscale": 1.24,
    "original_max_position_embeddings": 64,
}


def make_config(family: str, **changes: Any) -> dict[str, Any]:
    """Return the tiny configuration of a family with changes; the value ``...`` removes a key."""
    values = TINY_CONFIGS[family]() | changes
    return {key: value for key, value in values.items() if value is not ...}


def compute_logits(pipeline: TextGenerationPipeline, tokens: list[int] = TOKENS) -> torch.Tensor:  # [T, V]
    """Return the logits of a prefill, followed by the logits of ten decode steps."""
    # Echo turns off the prefix cache, so every row is computed.
    context = make_context(tokens[:-10], log_probabilities_echo=True)
    rows = [step_logits(pipeline, [context])[0]]
    for token in tokens[-10:]:
        append_token(pipeline, context, token)
        rows.append(step_logits(pipeline, [context])[0])
    pipeline.release(context)
    return torch.cat(rows)


def relative_error(pipeline: TextGenerationPipeline, expected: torch.Tensor) -> float:
    """Return the largest error of the logits, divided by the tolerance."""
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    return float((compute_logits(pipeline) - expected).abs().max()) / tolerance


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe, normalized top-k weights": (
        "qwen2_moe",
        {"norm_topk_prob": True, "qkv_bias": False, "mlp_only_layers": []},
    ),
    "qwen2_moe, experts in every other layer": (
        "qwen2_moe",
        {"decoder_sparse_step": 2, "tie_word_embeddings": True},
    ),
    "qwen2_moe, sliding window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2, "num_experts_per_tok": 7},
    ),
    "olmoe, normalized top-k weights": (
        "olmoe",
        {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 6},
    ),
    "olmoe, one expert per token": ("olmoe", {"num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "granitemoe, all experts per token": ("granitemoe", {"num_experts_per_tok": 7, "attention_bias": True}),
    "granitemoe, tied head": ("granitemoe", {"tie_word_embeddings": True, "num_experts_per_tok": 1}),
    "glm4_moe, GLM-4.5-Air": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "use_qk_norm": False, "head_dim": 24},
    ),
    "glm4_moe, unnormalized top-k weights": (
        "glm4_moe",
        {"norm_topk_prob": False, "routed_scaling_factor": 0.7, "topk_group": 3, "attention_bias": False},
    ),
    "glm4_moe, one layer with experts": ("glm4_moe", {"first_k_dense_replace": 2, "topk_group": 4}),
    "glm4_moe, no dense layer": ("glm4_moe", {"first_k_dense_replace": 0, "partial_rotary_factor": 0.25}),
    "minimax_m2, rotary_dim 4": ("minimax_m2", {"rotary_dim": 4, "tie_word_embeddings": True}),
    "minimax_m2, all experts per token": ("minimax_m2", {"num_experts_per_tok": 8, "rotary_dim": 16}),
    "ernie4_5_moe, experts in every other layer": (
        "ernie4_5_moe",
        {"moe_layer_interval": 2, "moe_layer_start_index": 0, "use_bias": False, "num_hidden_layers": 4},
    ),
    "ernie4_5_moe, published configuration": (
        "ernie4_5_moe",
        {"moe_num_shared_experts": 1, "moe_layer_end_index": 1, "head_dim": 24, "tie_word_embeddings": True},
    ),
    "phimoe, published configuration": (
        "phimoe",
        {"router_jitter_noise": 0.01, "sliding_window": 30, "rope_theta": 1e6, "rope_scaling": LONGROPE},
    ),
    "phimoe, no biases": ("phimoe", {"attention_bias": False, "lm_head_bias": False}),
    "llama4_text, Maverick": (
        "llama4_text",
        {"moe_layers": ..., "interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": False},
    ),
    "llama4_text, two experts per token": (
        "llama4_text",
        {"num_experts_per_tok": 2, "no_rope_layers": ..., "no_rope_layer_interval": 2},
    ),
    "llama4_text, no temperature tuning": (
        "llama4_text",
        {"attn_temperature_tuning": False, "attention_chunk_size": 5, "num_key_value_heads": 6},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    config = make_config(family, **changes)
    write_checkpoint(tmp_path, config)
    expected = transformers_logits(load_in_transformers(tmp_path), TOKENS)
    assert relative_error(open_pipeline(tmp_path, kv_cache_block_size=16), expected) <= 1
    (tmp_path / "config.json").write_text(json.dumps(config))  # keys as in the published configuration
    assert relative_error(open_pipeline(tmp_path, kv_cache_block_size=16), expected) <= 1


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return write_checkpoint(folder, make_config(request.param))


# ---- mutations ----


def mutate_layers(network: Any, change: Callable[[Any], Any]) -> Any:
    """Return the network with a function applied to each layer of experts; None if no layer changes."""
    blocks = [
        replace(block, mlp=change(block.mlp)) if isinstance(block.mlp, Experts | SharedExperts) else block
        for block in network.blocks
    ]
    is_unchanged = all(new.mlp is old.mlp for new, old in zip(blocks, network.blocks, strict=True))
    return None if is_unchanged else replace(network, blocks=tuple(blocks))


def mutate_experts(**changes_by_field: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that changes a layer's experts, or returns the same layer if nothing changes."""

    def change(layer: Any) -> Any:
        experts = layer.experts if isinstance(layer, SharedExperts) else layer
        new_values = {name: function(getattr(experts, name)) for name, function in changes_by_field.items()}
        if all(value is getattr(experts, name) for name, value in new_values.items()):
            return layer
        changed_experts = replace(experts, **new_values)
        return (
            replace(layer, experts=changed_experts) if isinstance(layer, SharedExperts) else changed_experts
        )

    return change


def mutate_routing(**fields: Any) -> Callable[[Any], Any]:
    """Return a function that changes the `ScoreRouting` of a layer."""

    def change(routing: Any) -> Any:
        existing_fields = {name: value for name, value in fields.items() if hasattr(routing, name)}
        changed_routing = replace(routing, **existing_fields) if existing_fields else routing
        return routing if changed_routing == routing else changed_routing

    return mutate_experts(routing=change)


def drop_shared_gate(layer: Any) -> Any:
    has_gate = isinstance(layer, SharedExperts) and layer.gate is not None
    return replace(layer, gate=None) if has_gate else layer


MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "correction bias dropped": mutate_experts(correction_bias=lambda bias: None),
    "scaling factor 1": mutate_routing(scale=1.0),
    "expert groups ignored": mutate_routing(num_groups=1),
    "one expert group too few": mutate_routing(num_top_groups=1),
    "unnormalized top-k weights": mutate_routing(is_normed=False),
    "softmax instead of sigmoid scores": mutate_routing(scores="softmax"),
    "sigmoid instead of softmax scores": mutate_routing(scores="sigmoid"),
    "larger eps": mutate_routing(eps=100.0),
    "shared experts dropped": lambda layer: layer.experts if isinstance(layer, SharedExperts) else layer,
    "gate of the shared experts dropped": drop_shared_gate,
    "one expert too many": mutate_experts(top_k=lambda top_k: top_k + 1),
    "softmax over all experts": mutate_experts(
        routing=lambda routing: (
            routing if isinstance(routing, ScoreRouting) else "all" if routing != "all" else "chosen"
        )
    ),
}
_SCORE_MUTATIONS = {
    "correction bias dropped",
    "unnormalized top-k weights",
    "softmax instead of sigmoid scores",
    "one expert too many",
}
APPLICABLE_MUTATIONS = {
    "qwen2_moe": {"shared experts dropped", "gate of the shared experts dropped", "one expert too many"}
    | {"softmax over all experts"},
    "olmoe": {"one expert too many", "softmax over all experts"},
    "granitemoe": {"one expert too many", "softmax over all experts"},
    "glm4_moe": _SCORE_MUTATIONS
    | {"scaling factor 1", "expert groups ignored", "one expert group too few", "shared experts dropped"},
    "minimax_m2": _SCORE_MUTATIONS,
    "ernie4_5_moe": {"correction bias dropped", "unnormalized top-k weights", "one expert too many"}
    | {"shared experts dropped", "sigmoid instead of softmax scores"},
    "phimoe": {"one expert too many", "softmax over all experts", "larger eps"},
    "llama4_text": set(),
}


def test_each_mutation_changes_the_logits(checkpoint: Path) -> None:
    expected = transformers_logits(load_in_transformers(checkpoint), TOKENS)
    pipeline = open_pipeline(checkpoint, kernels="reference", kv_cache_block_size=16)
    model: Any = pipeline.model
    network = model.network
    assert relative_error(pipeline, expected) <= 1
    applied_mutations = set()
    for name, mutate in MUTATIONS.items():
        changed_network = mutate_layers(network, mutate)
        if changed_network is not None:
            model.network = changed_network
            assert relative_error(pipeline, expected) > 10, name
            applied_mutations.add(name)
    assert applied_mutations == APPLICABLE_MUTATIONS[model.huggingface_config.model_type]


# ---- types ----


def scale_down_matrices(folder: Path) -> Path:
    """Scale the matrices of a checkpoint so that rounding errors do not grow from layer to layer."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and "embed" not in name:
            tensor *= 0.35
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bfloat16_error_is_at_most_a_fifth_larger_than_in_transformers(
    family: str, tmp_path: Path
) -> None:
    folder = scale_down_matrices(write_checkpoint(tmp_path, make_config(family)))
    tokens = random_tokens(120, 130, seed=8)
    reference = load_in_transformers(folder)
    exact_logits = transformers_logits(reference, tokens)
    reference_logits = transformers_logits(reference.bfloat16(), tokens)
    pipeline = open_pipeline(folder, kv_cache_block_size=16, quantization_encoding="bfloat16")
    bfloat16_logits = compute_logits(pipeline, tokens)
    errors = [float((logits - exact_logits).abs().median()) for logits in (bfloat16_logits, reference_logits)]
    assert errors[0] <= 1.2 * errors[1]


# ---- refused configurations ----

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "clip_qkv": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: was 8.0"),
    "too many experts": ("qwen2_moe", {"num_experts_per_tok": 8}, "8 experts per token exceed the 7 experts"),
    "indivisible expert groups": ("glm4_moe", {"n_group": 5}, "n_group: 5 groups do not divide 12"),
    "topk_group above n_group": (
        "glm4_moe",
        {"topk_group": 5},
        r"topk_group: must be at most n_group \(4\), was 5",
    ),
    "sliding layer types without use_sliding_window": (
        "qwen2_moe",
        {"layer_types": ["sliding_attention"] * 3},
        "use_sliding_window",
    ),
    "linear attention": ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list: must be 1"),
    "softmax scores": ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func: must be 'sigmoid'"),
    "query and key norms per head": (
        "minimax_m2",
        {"qk_norm_type": "per_head"},
        "qk_norm_type: must be 'per_layer'",
    ),
    "shared experts": ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size: must be 0"),
    "three experts per token": ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok: must be 2"),
    "different longrope factors": (
        "phimoe",
        {"rope_scaling": LONGROPE | {"long_mscale": 1.3}},
        "long_mscale: must be short_mscale, 1.24, was 1.3",
    ),
    "unknown moe_gate": ("ernie4_5_moe", {"moe_gate": "top2_fused"}, "moe_gate: must be 'topk'"),
    "compression_ratio": ("ernie4_5_moe", {"compression_ratio": 2.0}, "compression_ratio: must be 1"),
    "unknown layer type": (
        "llama4_text",
        {"layer_types": ["sliding_attention"] * 4},
        "layer_types: must be 4 of full_attention and chunked_attention",
    ),
    "no_rope_layers too short": (
        "llama4_text",
        {"no_rope_layers": [1, 0]},
        "no_rope_layers: must be a list of 4",
    ),
    "num_shared_experts": ("granitemoe", {"num_shared_experts": 1}, "num_shared_experts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_configurations_are_refused(case: str, tmp_path: Path) -> None:
    family, changes, message = REFUSED[case]
    write_checkpoint(tmp_path, make_config(family))
    (tmp_path / "config.json").write_text(json.dumps(make_config(family, **changes)))
    with pytest.raises(ConfigError, match=message):
        open_pipeline(tmp_path)


def test_phimoe_is_limited_to_its_original_length(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config("phimoe", rope_scaling=LONGROPE))
    assert open_pipeline(tmp_path).model.max_seq_len == 64


# ---- Llama 4 ----


def mutate_attention(network: Any, **fields: Any) -> Any:
    """Return the network with the given values of fields of the attention in each block."""
    blocks = [replace(block, attention=replace(block.attention, **fields)) for block in network.blocks]
    return replace(network, blocks=tuple(blocks))


def mutate_llama4_experts(network: Any, change: Callable[[Any], Any]) -> Any:
    """Return the network with a function applied to each layer of Llama 4 experts."""
    blocks = [
        replace(block, mlp=change(block.mlp)) if isinstance(block.mlp, Llama4Experts) else block
        for block in network.blocks
    ]
    return replace(network, blocks=tuple(blocks))


def scale_outputs(experts: Any) -> Any:
    """Return experts that scale their outputs instead of their inputs."""
    return Experts(experts.router, experts.packed, experts.top_k, "all", experts.activation)


LLAMA4_MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "query norm dropped": lambda n: mutate_attention(n, q_norm=None),
    "rotary layout of halves": lambda n: mutate_attention(n, is_interleaved=False),
    "rope in all layers": lambda n: mutate_attention(n, rotary_index=0),
    "query scaling dropped": lambda n: replace(n, rotaries=n.rotaries[:1]),
    "two experts per token": lambda n: mutate_llama4_experts(n, lambda e: replace(e, top_k=2)),
    "outputs scaled instead of inputs": lambda n: mutate_llama4_experts(n, scale_outputs),
}


def test_each_mutation_of_llama4_changes_the_logits(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config("llama4_text"))
    expected = transformers_logits(load_in_transformers(tmp_path), TOKENS)
    pipeline = open_pipeline(tmp_path, kernels="reference", kv_cache_block_size=16)
    model: Any = pipeline.model
    network = model.network
    for name, mutate in LLAMA4_MUTATIONS.items():
        model.network = mutate(network)
        assert relative_error(pipeline, expected) > 10, name


@pytest.mark.parametrize("chunk", [23, 25, 256])
def test_another_attention_chunk_size_changes_the_logits(chunk: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config("llama4_text"))
    expected = transformers_logits(load_in_transformers(tmp_path), TOKENS)
    (tmp_path / "config.json").write_text(json.dumps(make_config("llama4_text", attention_chunk_size=chunk)))
    assert relative_error(open_pipeline(tmp_path, kv_cache_block_size=16), expected) > 10
