"""Mixtral, Qwen3-MoE and gpt-oss: variants, mutations, checkpoint layouts, MXFP4, refused settings."""

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
from support.encodings import HalvedEncoding
from support.networks import modules_and_weights, weight_bytes
from support.pipeline_steps import append_token, make_context, open_pipeline, random_tokens, step_logits

from penstock.errors import CheckpointError, ConfigError, WeightsError
from penstock.kernels import (
    ENCODINGS,
    ClampedSwiGLU,
    PackedExperts,
    PackedLinear,
    pack_linear,
    unpack_linear,
)
from penstock.pipelines import TextGenerationPipeline
from penstock.weights.formats.mxfp4 import dequantize

TOKENS = random_tokens(60, 130, seed=5)
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")
TINY_CONFIGS = {
    candidate.name: candidate.tiny_config for candidate in DECODERS if candidate.tiny_config is not None
}


def make_config(family: str, **changes: Any) -> dict[str, Any]:
    """Return a family's tiny configuration with changes; the value ``...`` removes a key."""
    values = TINY_CONFIGS[family]() | changes
    return {key: value for key, value in values.items() if value is not ...}


def compute_logits(pipeline: TextGenerationPipeline) -> torch.Tensor:
    """Return the logits of a prefill, followed by the logits of ten decode steps."""
    # Echo turns off the prefix cache, so every row is computed.
    context = make_context(TOKENS[:50], log_probabilities_echo=True)
    rows = [step_logits(pipeline, [context])[0]]
    for token in TOKENS[50:]:
        append_token(pipeline, context, token)
        rows.append(step_logits(pipeline, [context])[0])
    pipeline.release(context)
    return torch.cat(rows)


def relative_error(pipeline: TextGenerationPipeline, reference: Any) -> float:
    """Return the largest error of the logits against transformers, in multiples of the tolerance."""
    expected = transformers_logits(reference, TOKENS)
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    return float((compute_logits(pipeline) - expected).abs().max()) / tolerance


# ---- variants ----

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral, sliding window": ("mixtral", {"sliding_window": 20}),
    "mixtral, all experts": ("mixtral", {"num_experts_per_tok": 5, "tie_word_embeddings": True}),
    "mixtral, head_dim 24": ("mixtral", {"head_dim": 24, "hidden_act": "gelu", "num_key_value_heads": 6}),
    "mixtral, one expert": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen, unnormalized top-k weights": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    "qwen, experts in every other layer": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "qwen, one expert per token": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "qwen, sliding window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
    "gpt-oss, full attention in all layers": (
        "gpt_oss",
        {"layer_types": ["full_attention"] * 2, "num_experts_per_tok": 5},
    ),
    "gpt-oss, sliding window of 3": (
        "gpt_oss",
        {"layer_types": ..., "num_hidden_layers": 4, "sliding_window": 3},
    ),
    "gpt-oss, default rope": ("gpt_oss", {"rope_scaling": {"rope_type": "default"}, "attention_bias": False}),
    "gpt-oss, truncated yarn": (
        "gpt_oss",
        {"rope_scaling": TINY_CONFIGS["gpt_oss"]()["rope_scaling"] | {"truncate": True}, "hidden_size": 40},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    write_checkpoint(tmp_path, make_config(family, **changes))
    reference = load_in_transformers(tmp_path)
    assert relative_error(open_pipeline(tmp_path, kv_cache_block_size=16), reference) <= 1


PUBLISHED_CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen, disabled sliding window": ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 20}),
    "qwen, key of transformers 4": ("qwen3_moe", {"num_experts": 7, "num_local_experts": ...}),
    "qwen, mlp_only_layers null": ("qwen3_moe", {"mlp_only_layers": None, "decoder_sparse_step": 2}),
    "gpt-oss, default layer types": ("gpt_oss", {"layer_types": ...}),
    "gpt-oss, keys of OpenAI": ("gpt_oss", {"experts_per_token": 2, "initial_context_length": 32}),
    "mixtral, router_jitter_noise": ("mixtral", {"router_jitter_noise": 0.1}),
}


@pytest.mark.parametrize("case", PUBLISHED_CHANGES)
def test_key_names_and_values_of_published_files_are_read(case: str, tmp_path: Path) -> None:
    """Published files have other key names and values than the files that transformers writes."""
    family, changes = PUBLISHED_CHANGES[case]
    dense_layers = {"mlp_only_layers": [], "decoder_sparse_step": 2} if "mlp_only_layers" in changes else {}
    write_checkpoint(tmp_path, make_config(family, **dense_layers))
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    values = {key: value for key, value in config.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert (
        relative_error(open_pipeline(tmp_path, kv_cache_block_size=16), load_in_transformers(tmp_path)) <= 1
    )


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), make_config(request.param))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a gpt-oss checkpoint with gates so large that many exceed the clamping limit."""
    folder = write_checkpoint(tmp_path_factory.mktemp("gpt_oss"), make_config("gpt_oss"))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            tensor *= 12
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_bfloat16_logits_are_close_to_float32(checkpoint: Path) -> None:
    float32_logits = compute_logits(open_pipeline(checkpoint, kv_cache_block_size=16))
    bfloat16_logits = compute_logits(
        open_pipeline(checkpoint, kv_cache_block_size=16, quantization_encoding="bfloat16")
    )
    # The median is compared, because a few rows are routed to other experts in bfloat16.
    assert float((bfloat16_logits - float32_logits).abs().median()) < 0.1 * float(float32_logits.std())


# ---- mutations ----


def mutate_experts(network: Any, **changes_by_field: Callable[[Any], Any]) -> Any:
    """Return the network with functions applied to parts of its experts."""

    def alter(block: Any) -> Any:
        if not isinstance(getattr(block.mlp, "packed", None), PackedExperts):
            return block
        changes = {name: change(getattr(block.mlp, name)) for name, change in changes_by_field.items()}
        return replace(block, mlp=replace(block.mlp, **changes))

    return replace(network, blocks=tuple(alter(block) for block in network.blocks))


def swap_experts(packed: PackedExperts) -> PackedExperts:
    gate_up, down = list(packed.gate_up), list(packed.down)
    gate_up[0], gate_up[1], down[0], down[1] = gate_up[1], gate_up[0], down[1], down[0]
    return PackedExperts(tuple(gate_up), tuple(down))


def swap_gates_and_ups(packed: PackedExperts) -> PackedExperts:
    def swap_halves(linear: PackedLinear) -> PackedLinear:
        assert linear.bias is not None
        num_gate_rows = linear.out_features // 2
        weight, bias = unpack_linear(linear).roll(num_gate_rows, 0), linear.bias.roll(num_gate_rows, 0)
        return pack_linear(weight, linear.encoding, bias=bias, slices=linear.slices)

    return replace(packed, gate_up=tuple(map(swap_halves, packed.gate_up)))


def drop_bias(linear: Any) -> Any:
    return replace(linear, packed=replace(linear.packed, bias=None))


MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "two experts swapped": lambda n: mutate_experts(n, packed=swap_experts),
    "unnormalized top-k weights": lambda n: mutate_experts(n, routing=lambda _: "all"),
    "one expert too few": lambda n: mutate_experts(n, top_k=lambda top_k: top_k - 1),
    "one expert too many": lambda n: mutate_experts(n, top_k=lambda top_k: top_k + 1),
}
GPT_OSS_MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "gate and up swapped": lambda n: mutate_experts(n, packed=swap_gates_and_ups),
    "router bias dropped": lambda n: mutate_experts(n, router=drop_bias),
    "other clamping limit": lambda n: mutate_experts(
        n, activation=lambda gate: ClampedSwiGLU(gate.alpha, 7.5)
    ),
    "other alpha of the gate": lambda n: mutate_experts(
        n, activation=lambda gate: ClampedSwiGLU(1.6, gate.limit)
    ),
    "down bias dropped": lambda n: mutate_experts(
        n, packed=lambda p: replace(p, down=tuple(replace(linear, bias=None) for linear in p.down))
    ),
    "attention sinks dropped": lambda n: replace(
        n, blocks=tuple(replace(b, attention=replace(b.attention, sinks=None)) for b in n.blocks)
    ),
}


def test_each_mutation_changes_the_logits(checkpoint: Path) -> None:
    reference, pipeline = load_in_transformers(checkpoint), open_pipeline(checkpoint, kv_cache_block_size=16)
    model: Any = pipeline.model
    network = model.network
    for name, mutate in MUTATIONS.items():
        model.network = mutate(network)
        assert relative_error(pipeline, reference) > 10, name
    model.network = network
    assert relative_error(pipeline, reference) <= 1


def test_each_mutation_of_gpt_oss_changes_the_logits(gpt_oss: Path) -> None:
    reference, pipeline = load_in_transformers(gpt_oss), open_pipeline(gpt_oss, kv_cache_block_size=16)
    assert relative_error(pipeline, reference) <= 1
    model: Any = pipeline.model
    network = model.network
    for name, mutate in GPT_OSS_MUTATIONS.items():
        model.network = mutate(network)
        assert relative_error(pipeline, reference) > 10, name


# ---- layouts ----


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_logits_of_stacked_expert_tensors_equal_those_of_separate_tensors(
    family: str, tmp_path: Path
) -> None:
    """transformers 5 stacks the experts in memory, and writes stacked tensors if conversion is disabled."""
    separate_folder = write_checkpoint(tmp_path / "separate", make_config(family))
    load_in_transformers(separate_folder).save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = load_file(tmp_path / "stacked" / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert not any(".experts.0." in name for name in names)
    pipelines = [open_pipeline(folder) for folder in (separate_folder, tmp_path / "stacked")]
    assert torch.equal(*map(compute_logits, pipelines))
    separate_names, stacked_names = (
        [
            layer.name.rpartition("experts")[2]
            for linear in packed_experts.gate_up + packed_experts.down
            for layer in linear.slices
        ]
        for packed_experts in (pipeline.model.network.blocks[0].mlp.packed for pipeline in pipelines)  # type: ignore[attr-defined]
    )
    assert separate_names == stacked_names, "an adapter finds the layers of each expert by these names"


def test_experts_are_quantized_and_routers_are_not(checkpoint: Path) -> None:
    with ENCODINGS.extended(HalvedEncoding()):
        assert_only_experts_are_quantized(checkpoint)


def assert_only_experts_are_quantized(checkpoint: Path) -> None:
    pipeline = open_pipeline(checkpoint, quantization_encoding="halved", kv_cache_block_size=16)
    model: Any = pipeline.model
    layer = model.network.blocks[0].mlp
    assert layer.router.packed.encoding == "float32"
    assert {linear.encoding for linear in layer.packed.gate_up + layer.packed.down} == {"halved"}
    assert relative_error(pipeline, load_in_transformers(checkpoint)) <= 1


def test_the_error_names_a_missing_expert(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_config("mixtral"))
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_local_experts": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"experts\.5\.w1\.weight.*\[5, 48\].*\[6, 48\]"):
        open_pipeline(tmp_path)


def write_mxfp4(folder: Path, parent: Path, **config: Any) -> tuple[Path, Path]:
    """Write two gpt-oss checkpoints: one with random MXFP4 experts, the other with equal float values."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    packed_tensors, float_tensors = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).byte()
            scales = torch.randint(120, 126, (experts, outputs, inputs // 32), generator=generator).byte()
            del packed_tensors[name]
            packed_tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            float_tensors[name] = dequantize(blocks, scales).transpose(1, 2).float().contiguous()
    saved_config = json.loads((folder / "config.json").read_text())
    for name, content, changes in (
        ("packed", packed_tensors, {"quantization_config": {"quant_method": "mxfp4"}} | config),
        ("plain", float_tensors, {}),
    ):
        (parent / name).mkdir()
        save_file(content, parent / name / "model.safetensors", metadata={"format": "pt"})
        values = {key: value for key, value in (saved_config | changes).items() if value is not ...}
        (parent / name / "config.json").write_text(json.dumps(values))
    return parent / "packed", parent / "plain"


def test_mxfp4_experts_give_the_logits_of_their_float_values(gpt_oss: Path, tmp_path: Path) -> None:
    packed_folder, float_folder = write_mxfp4(gpt_oss, tmp_path)
    pipeline = open_pipeline(packed_folder, kv_cache_block_size=16)
    assert relative_error(pipeline, load_in_transformers(float_folder)) <= 1
    assert torch.equal(
        compute_logits(pipeline), compute_logits(open_pipeline(float_folder, kv_cache_block_size=16))
    )


def test_mxfp4_experts_are_kept_in_mxfp4(gpt_oss: Path, tmp_path: Path) -> None:
    """Gate and up rows alternate in the checkpoint. Loading separates them without changing a number."""
    # OpenAI's configuration files have no ``dtype``.
    packed_folder, float_folder = write_mxfp4(gpt_oss, tmp_path, dtype=...)
    pipeline = open_pipeline(packed_folder, quantization_encoding=None, kv_cache_block_size=16)
    model: Any = pipeline.model
    assert model.pipeline_config.model.encoding == "mxfp4"
    linears = [module for module in modules_and_weights(model.network) if isinstance(module, PackedLinear)]
    experts = [linear for linear in linears if linear.encoding == "mxfp4"]
    assert len(experts) == 2 * 2 * 5
    assert {linear.encoding for linear in linears} == {"mxfp4", "bfloat16", "int8"}
    float_tensors = load_file(float_folder / "model.safetensors")
    gate_up = float_tensors["model.layers.0.mlp.experts.gate_up_proj"][0].T
    down = float_tensors["model.layers.0.mlp.experts.down_proj"][0].T
    weights = [unpack_linear(expert) for expert in experts]
    assert any(
        torch.equal(weight, torch.cat([gate_up[0::2], gate_up[1::2]]))
        for weight in weights
        if len(weight) == 64
    )
    assert any(torch.equal(weight, down) for weight in weights)
    float32_logits = compute_logits(open_pipeline(float_folder, kv_cache_block_size=16))
    assert float((compute_logits(pipeline).float() - float32_logits).norm() / float32_logits.norm()) < 0.05
    estimated_bytes = model.estimate_weights_size(model.pipeline_config)
    assert 0.995 * weight_bytes(pipeline) <= estimated_bytes <= 1.5 * weight_bytes(pipeline)


def test_malformed_mxfp4_tensors_are_refused(gpt_oss: Path, tmp_path: Path) -> None:
    packed_folder, _ = write_mxfp4(gpt_oss, tmp_path)
    tensors = load_file(packed_folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    del tensors[f"{name}_scales"]
    tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][:, :, :, :8].contiguous()
    save_file(tensors, packed_folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"_scales is missing.*down_proj_blocks is \[5, 64, 1, 8\]"):
        open_pipeline(packed_folder)


def test_mxfp4_shapes_that_contradict_the_configuration_are_refused(gpt_oss: Path, tmp_path: Path) -> None:
    packed_folder, _ = write_mxfp4(gpt_oss, tmp_path, intermediate_size=40)
    with pytest.raises(WeightsError, match=r"gate_up_proj\.0\.weight.* is \[64, 64\] where .*\[80, 64\]"):
        open_pipeline(packed_folder)


# ---- refused configurations ----

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral, too many experts per token": (
        "mixtral",
        {"num_experts_per_tok": 6},
        "6 experts .* the 5 experts",
    ),
    "qwen, too many experts per token": (
        "qwen3_moe",
        {"num_experts_per_tok": 8},
        "8 experts .* the 7 experts",
    ),
    "gpt-oss, too many experts per token": (
        "gpt_oss",
        {"num_experts_per_tok": 9},
        "9 experts .* the 5 experts",
    ),
    "shared expert": ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert.*64"),
    "layer name instead of index": ("qwen3_moe", {"mlp_only_layers": ["first"]}, "mlp_only_layers.*first"),
    "unsupported activation": ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act.*gelu"),
    "sliding_window null": ("gpt_oss", {"sliding_window": None}, "sliding_window"),
    "mixtral, unknown quantization": (
        "mixtral",
        {"quantization_config": {"quant_method": "quip", "bits": 4}},
        "checkpoints of 'quip' cannot be read: use one of plain floats, .*mxfp4.*, such as the model",
    ),
    "gpt-oss, unknown quantization": (
        "gpt_oss",
        {"quantization_config": {"quant_method": "quip"}},
        "'quip' cannot be read: use one of plain floats, .*mxfp4.*, such as",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_configurations_are_refused(case: str, tmp_path: Path) -> None:
    family, changes, message = REFUSED[case]
    write_checkpoint(tmp_path, make_config(family))
    values = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        CheckpointError if case == "layer name instead of index" else ConfigError, match=message
    ):
        open_pipeline(tmp_path)
