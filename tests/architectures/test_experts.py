"""Families with experts: variants, both checkpoint layouts, MXFP4, adapters, refused settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import DECODERS, oracle, oracle_logits, write_checkpoint
from support.encodings import HalvedEncoding
from support.networks import held_bytes, parts_of
from support.running import context_of, feed, open_pipeline, random_tokens, step_logits

from penstock.errors import CheckpointError, ConfigError, UnsupportedFeatureError, WeightsError
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
TINY = {candidate.name: candidate.tiny_config for candidate in DECODERS if candidate.tiny_config is not None}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """Return a family's tiny configuration with changes; the value ``...`` removes a key."""
    values = TINY[family]() | changes
    return {key: value for key, value in values.items() if value is not ...}


def logits_of(pipeline: TextGenerationPipeline) -> torch.Tensor:
    """Return the logits of a prompt, then of single tokens."""
    context = context_of(TOKENS[:50], log_probabilities_echo=True)  # every row computed, none from the cache
    rows = [step_logits(pipeline, [context])[0]]
    for token in TOKENS[50:]:
        feed(pipeline, context, token)
        rows.append(step_logits(pipeline, [context])[0])
    pipeline.release(context)
    return torch.cat(rows)


def relative_error(pipeline: TextGenerationPipeline, reference: Any) -> float:
    """Return the largest error of the logits against transformers, in multiples of the tolerance."""
    expected = oracle_logits(reference, TOKENS)
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    return float((logits_of(pipeline) - expected).abs().max()) / tolerance


# ---- variants ----

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral with a window": ("mixtral", {"sliding_window": 20}),
    "mixtral, all experts": ("mixtral", {"num_experts_per_tok": 5, "tie_word_embeddings": True}),
    "mixtral, wide heads": ("mixtral", {"head_dim": 24, "hidden_act": "gelu", "num_key_value_heads": 6}),
    "mixtral, one expert": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen, not normed": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    "qwen, every other layer": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "qwen, one expert a token": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "qwen with windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
    "gpt-oss, all full": ("gpt_oss", {"layer_types": ["full_attention"] * 2, "num_experts_per_tok": 5}),
    "gpt-oss, a narrow window": (
        "gpt_oss",
        {"layer_types": ..., "num_hidden_layers": 4, "sliding_window": 3},
    ),
    "gpt-oss, plain rope": ("gpt_oss", {"rope_scaling": {"rope_type": "default"}, "attention_bias": False}),
    "gpt-oss, rope truncated": (
        "gpt_oss",
        {"rope_scaling": TINY["gpt_oss"]()["rope_scaling"] | {"truncate": True}, "hidden_size": 40},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    write_checkpoint(tmp_path, config_of(family, **changes))
    reference = oracle(tmp_path)
    assert relative_error(open_pipeline(tmp_path, kv_cache_block_size=16), reference) <= 1


SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen with windows unused": ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 20}),
    "qwen as before transformers 5": ("qwen3_moe", {"num_experts": 7, "num_local_experts": ...}),
    "qwen without a list of layers": ("qwen3_moe", {"mlp_only_layers": None, "decoder_sparse_step": 2}),
    "gpt-oss, layers in turns": ("gpt_oss", {"layer_types": ...}),
    "gpt-oss with OpenAI's own keys": ("gpt_oss", {"experts_per_token": 2, "initial_context_length": 32}),
    "mixtral that was trained with noise": ("mixtral", {"router_jitter_noise": 0.1}),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_other_spellings_of_keys_are_read(case: str, tmp_path: Path) -> None:
    """Published files spell some keys differently than transformers does."""
    family, changes = SPELLINGS[case]
    dense = {"mlp_only_layers": [], "decoder_sparse_step": 2} if "mlp_only_layers" in changes else {}
    write_checkpoint(tmp_path, config_of(family, **dense))
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    values = {key: value for key, value in config.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert relative_error(open_pipeline(tmp_path, kv_cache_block_size=16), oracle(tmp_path)) <= 1


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), config_of(request.param))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a gpt-oss checkpoint with gates so large that many exceed the clamping limit."""
    folder = write_checkpoint(tmp_path_factory.mktemp("gpt_oss"), config_of("gpt_oss"))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            tensor *= 12
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_bfloat16_logits_are_close_to_float32(checkpoint: Path) -> None:
    float32_logits = logits_of(open_pipeline(checkpoint, kv_cache_block_size=16))
    bfloat16_logits = logits_of(
        open_pipeline(checkpoint, kv_cache_block_size=16, quantization_encoding="bfloat16")
    )
    # some rows are routed to other experts
    assert float((bfloat16_logits - float32_logits).abs().median()) < 0.1 * float(float32_logits.std())


# ---- mutations ----


def mutate_experts(network: Any, **parts: Callable[[Any], Any]) -> Any:
    """Return the network with functions applied to parts of its experts."""

    def alter(block: Any) -> Any:
        if not isinstance(getattr(block.mlp, "packed", None), PackedExperts):
            return block
        changes = {name: change(getattr(block.mlp, name)) for name, change in parts.items()}
        return replace(block, mlp=replace(block.mlp, **changes))

    return replace(network, blocks=tuple(alter(block) for block in network.blocks))


def swap_experts(packed: PackedExperts) -> PackedExperts:
    gate_up, down = list(packed.gate_up), list(packed.down)
    gate_up[0], gate_up[1], down[0], down[1] = gate_up[1], gate_up[0], down[1], down[0]
    return PackedExperts(tuple(gate_up), tuple(down))


def swap_gates_and_ups(packed: PackedExperts) -> PackedExperts:
    def swap_halves(linear: PackedLinear) -> PackedLinear:
        assert linear.bias is not None
        half = linear.out_features // 2
        weight, bias = unpack_linear(linear).roll(half, 0), linear.bias.roll(half, 0)
        return pack_linear(weight, linear.encoding, bias=bias, slices=linear.slices)

    return replace(packed, gate_up=tuple(map(swap_halves, packed.gate_up)))


def drop_bias(linear: Any) -> Any:
    return replace(linear, packed=replace(linear.packed, bias=None))


MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "two experts swapped": lambda n: mutate_experts(n, packed=swap_experts),
    "shares not normed": lambda n: mutate_experts(n, routing=lambda _: "all"),
    "one expert too few": lambda n: mutate_experts(n, top_k=lambda top_k: top_k - 1),
    "one expert too many": lambda n: mutate_experts(n, top_k=lambda top_k: top_k + 1),
}
GPT_OSS_MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "gates for ups": lambda n: mutate_experts(n, packed=swap_gates_and_ups),
    "a router without its bias": lambda n: mutate_experts(n, router=drop_bias),
    "another limit": lambda n: mutate_experts(n, gating=lambda gate: ClampedSwiGLU(gate.alpha, 7.5)),
    "another slope": lambda n: mutate_experts(n, gating=lambda gate: ClampedSwiGLU(1.6, gate.limit)),
    "downs without biases": lambda n: mutate_experts(
        n, packed=lambda p: replace(p, down=tuple(replace(linear, bias=None) for linear in p.down))
    ),
    "no sinks": lambda n: replace(
        n, blocks=tuple(replace(b, attention=replace(b.attention, sinks=None)) for b in n.blocks)
    ),
}


def test_each_mutation_changes_the_logits(checkpoint: Path) -> None:
    reference, pipeline = oracle(checkpoint), open_pipeline(checkpoint, kv_cache_block_size=16)
    model: Any = pipeline.model
    network = model.network
    for name, mutate in MUTATIONS.items():
        model.network = mutate(network)
        assert relative_error(pipeline, reference) > 10, name
    model.network = network
    assert relative_error(pipeline, reference) <= 1


def test_each_mutation_of_gpt_oss_changes_the_logits(gpt_oss: Path) -> None:
    reference, pipeline = oracle(gpt_oss), open_pipeline(gpt_oss, kv_cache_block_size=16)
    assert relative_error(pipeline, reference) <= 1
    model: Any = pipeline.model
    network = model.network
    for name, mutate in GPT_OSS_MUTATIONS.items():
        model.network = mutate(network)
        assert relative_error(pipeline, reference) > 10, name


# ---- layouts ----


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_stored_in_one_tensor_equal_separate_tensors(family: str, tmp_path: Path) -> None:
    """transformers 5 uses this layout in memory, and writes it if conversion is disabled."""
    per_expert = write_checkpoint(tmp_path / "older", config_of(family))
    oracle(per_expert).save_pretrained(tmp_path / "newer", save_original_format=False)
    names = load_file(tmp_path / "newer" / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert not any(".experts.0." in name for name in names)
    pipelines = [open_pipeline(folder) for folder in (per_expert, tmp_path / "newer")]
    assert torch.equal(*map(logits_of, pipelines))
    first, second = (
        [
            part.name.rpartition("experts")[2]
            for linear in packed.gate_up + packed.down
            for part in linear.slices
        ]
        for packed in (pipeline.model.network.blocks[0].mlp.packed for pipeline in pipelines)  # type: ignore[attr-defined]
    )
    assert first == second, "adapters apply to the layers of each expert in both layouts"


def test_experts_are_quantized_and_routers_are_not(checkpoint: Path) -> None:
    with ENCODINGS.extended(HalvedEncoding()):
        check_encoded_experts(checkpoint)


def check_encoded_experts(checkpoint: Path) -> None:
    pipeline = open_pipeline(checkpoint, quantization_encoding="halved", kv_cache_block_size=16)
    model: Any = pipeline.model
    layer = model.network.blocks[0].mlp
    assert layer.router.packed.encoding == "float32"
    assert {linear.encoding for linear in layer.packed.gate_up + layer.packed.down} == {"halved"}
    assert relative_error(pipeline, oracle(checkpoint)) <= 1


def test_the_error_names_a_missing_expert(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config_of("mixtral"))
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_local_experts": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"experts\.5\.w1\.weight.*\[5, 48\].*\[6, 48\]"):
        open_pipeline(tmp_path)


def write_mxfp4(folder: Path, to: Path, **config: Any) -> tuple[Path, Path]:
    """Write a gpt-oss checkpoint with random MXFP4 experts, and one with the equal float values."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    packed, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).byte()
            scales = torch.randint(120, 126, (experts, outputs, inputs // 32), generator=generator).byte()
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = dequantize(blocks, scales).transpose(1, 2).float().contiguous()
    saved_config = json.loads((folder / "config.json").read_text())
    for name, content, changes in (
        ("packed", packed, {"quantization_config": {"quant_method": "mxfp4"}} | config),
        ("plain", plain, {}),
    ):
        (to / name).mkdir()
        save_file(content, to / name / "model.safetensors", metadata={"format": "pt"})
        values = {key: value for key, value in (saved_config | changes).items() if value is not ...}
        (to / name / "config.json").write_text(json.dumps(values))
    return to / "packed", to / "plain"


def test_logits_of_mxfp4_experts_equal_those_of_their_float_values(gpt_oss: Path, tmp_path: Path) -> None:
    packed, plain = write_mxfp4(gpt_oss, tmp_path)
    pipeline = open_pipeline(packed, kv_cache_block_size=16)
    assert relative_error(pipeline, oracle(plain)) <= 1
    assert torch.equal(logits_of(pipeline), logits_of(open_pipeline(plain, kv_cache_block_size=16)))


def test_mxfp4_experts_are_kept_in_mxfp4(gpt_oss: Path, tmp_path: Path) -> None:
    """Gate and up rows alternate in the checkpoint. Loading separates them without changing a number."""
    packed, plain = write_mxfp4(
        gpt_oss, tmp_path, dtype=...
    )  # OpenAI's configuration files have no ``dtype``
    pipeline = open_pipeline(packed, quantization_encoding=None, kv_cache_block_size=16)
    model: Any = pipeline.model
    assert model.pipeline_config.model.encoding == "mxfp4"
    linears = [part for part in parts_of(model.network) if isinstance(part, PackedLinear)]
    experts = [linear for linear in linears if linear.encoding == "mxfp4"]
    assert len(experts) == 2 * 2 * 5
    assert {linear.encoding for linear in linears} == {"mxfp4", "bfloat16", "int8"}
    floats = load_file(plain / "model.safetensors")
    gate_up = floats["model.layers.0.mlp.experts.gate_up_proj"][0].T
    down = floats["model.layers.0.mlp.experts.down_proj"][0].T
    result = [unpack_linear(expert) for expert in experts]
    assert any(
        torch.equal(item, torch.cat([gate_up[0::2], gate_up[1::2]])) for item in result if len(item) == 64
    )
    assert any(torch.equal(item, down) for item in result)
    float32_logits = logits_of(open_pipeline(plain, kv_cache_block_size=16))
    assert float((logits_of(pipeline).float() - float32_logits).norm() / float32_logits.norm()) < 0.05
    estimated = model.estimate_weights_size(model.pipeline_config)
    assert 0.995 * held_bytes(pipeline) <= estimated <= 1.5 * held_bytes(pipeline)


def test_malformed_mxfp4_tensors_are_refused(gpt_oss: Path, tmp_path: Path) -> None:
    packed, _ = write_mxfp4(gpt_oss, tmp_path)
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    del tensors[f"{name}_scales"]
    tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][:, :, :, :8].contiguous()
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(WeightsError, match=r"_scales is missing.*down_proj_blocks is \[5, 64, 1, 8\]"):
        open_pipeline(packed)


def test_mxfp4_sizes_that_are_not_whole_blocks_are_refused(gpt_oss: Path, tmp_path: Path) -> None:
    packed, _ = write_mxfp4(gpt_oss, tmp_path, intermediate_size=40)
    with pytest.raises(WeightsError, match=r"gate_up_proj\.0\.weight.* is \[64, 64\] where .*\[80, 64\]"):
        open_pipeline(packed)


# ---- adapters ----


def write_per_expert_adapter(
    folder: Path, targets: list[str], matrices: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> Path:
    """Write an adapter in the format of older PEFT versions, with one module for each expert."""
    folder.mkdir()
    tensors = {}
    for name, (down, up) in matrices.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("family", "targets"), [("mixtral", ["w1", "w2"]), ("qwen3_moe", ["up_proj", "gate"])]
)
def test_an_adapter_on_single_experts_equals_merged_weights(
    family: str, targets: list[str], tmp_path: Path
) -> None:
    base = write_checkpoint(tmp_path / "base", config_of(family))
    tensors = load_file(base / "model.safetensors")
    matrices = {}
    for name, weight in list(tensors.items()):
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets:
            matrices[layer] = (torch.randn(2, weight.shape[1]) / 5, torch.randn(weight.shape[0], 2) / 5)
            tensors[name] = weight + matrices[layer][1] @ matrices[layer][0]
    assert len(matrices) >= 10
    adapter = write_per_expert_adapter(tmp_path / "adapter", targets, matrices)
    merged = tmp_path / "merged"
    merged.mkdir()
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    (merged / "config.json").write_text((base / "config.json").read_text())
    pipeline = open_pipeline(base, enable_lora=True, lora=(f"tone={adapter}",))
    contexts = [context_of(TOKENS, adapter="tone"), context_of(TOKENS)]
    adapted, plain = step_logits(pipeline, contexts)
    (expected,) = step_logits(open_pipeline(merged), [context_of(TOKENS)])
    torch.testing.assert_close(adapted, expected, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(adapted, plain, atol=0.1)


def test_an_adapter_on_a_tensor_of_all_experts_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    adapter = write_per_expert_adapter(tmp_path / "adapter", ["q_proj"], {})
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_parameters"] = ["mlp.experts.gate_up_proj"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFeatureError, match="target_parameters"):
        open_pipeline(checkpoint, enable_lora=True, lora=(f"tone={adapter}",))


# ---- refused configurations ----

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "more experts than there are": ("mixtral", {"num_experts_per_tok": 6}, "6 experts .* the 5 experts"),
    "more experts than qwen has": ("qwen3_moe", {"num_experts_per_tok": 8}, "8 experts .* the 7 experts"),
    "more than gpt-oss has": ("gpt_oss", {"num_experts_per_tok": 9}, "9 experts .* the 5 experts"),
    "experts for all tokens": ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert.*64"),
    "layers by name": ("qwen3_moe", {"mlp_only_layers": ["first"]}, "mlp_only_layers.*first"),
    "another gate": ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act.*gelu"),
    "a window of null": ("gpt_oss", {"sliding_window": None}, "sliding_window"),
    "another quantisation": (
        "mixtral",
        {"quantization_config": {"quant_method": "quip", "bits": 4}},
        "checkpoints of 'quip' cannot be read: use one of plain floats, .*mxfp4.*, such as the model",
    ),
    "another than MXFP4": (
        "gpt_oss",
        {"quantization_config": {"quant_method": "quip"}},
        "'quip' cannot be read: use one of plain floats, .*mxfp4.*, such as",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_configurations_are_refused(case: str, tmp_path: Path) -> None:
    family, changes, message = REFUSED[case]
    write_checkpoint(tmp_path, config_of(family))
    values = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError if case == "layers by name" else ConfigError, match=message):
        open_pipeline(tmp_path)
