"""Conversion of GGUF metadata to the settings of config.json, and errors of unsupported metadata."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from support.gguf_files import add_metadata, write_and_close

from penstock.architectures.gemma4_text.config import layer_configs, rotary_configs
from penstock.architectures.registry import PIPELINE_REGISTRY
from penstock.config import HuggingFaceConfig, PipelineConfig
from penstock.errors import CheckpointError
from penstock.nn.rotary import Rotary, RotaryConfig
from penstock.weights.gguf_config import gguf_config, gguf_generation_config

SIZES = {
    "context_length": 512,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def write_gguf_file(
    folder: Path,
    architecture: str = "llama",
    *,
    tensors: dict[str, np.ndarray] | None = None,
    omitted_keys: tuple[str, ...] = (),
    **metadata: Any,
) -> Path:
    """Write a file with few tensors. ``metadata`` has keys of the architecture, with ``__`` for dots."""
    writer = GGUFWriter(folder / "m.gguf", architecture)
    keys = SIZES | {name.replace("__", "."): value for name, value in metadata.items()}
    values = {f"{architecture}.{key}": value for key, value in keys.items() if key not in omitted_keys}
    add_metadata(writer, values)
    table = {"token_embd.weight": np.zeros((10, 64), np.float32)}
    for name, tensor in (table | (tensors or {})).items():
        writer.add_tensor(name, tensor)
    write_and_close(writer)
    return folder / "m.gguf"


def load_blueprint(file: Path) -> Any:
    config = HuggingFaceConfig.from_checkpoint(file)
    model = PIPELINE_REGISTRY.retrieve_architecture(config, file).load_pipeline_model()
    return model.blueprint(config)  # type: ignore[attr-defined]


def compute_rotary_tables(config: Any, head_dim: int = 16) -> torch.Tensor:
    rotary = Rotary(RotaryConfig.from_huggingface(config, head_dim), 64, torch.device("cpu"))
    return torch.stack([rotary.cos, rotary.sin])


def test_missing_keys_have_defaults(tmp_path: Path) -> None:
    assert gguf_config(write_gguf_file(tmp_path)) == {
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def test_tied_heads_biases_and_type_follow_from_the_tensors(tmp_path: Path) -> None:
    tensors = {
        "output.weight": np.zeros((10, 64), np.float16),
        "blk.0.attn_q.bias": np.zeros(64, np.float32),
        "blk.0.ffn_up.bias": np.zeros(96, np.float32),
        "blk.0.ffn_up.weight": np.zeros((96, 64), np.float16),
    }
    config = gguf_config(write_gguf_file(tmp_path, tensors=tensors))
    assert (config["tie_word_embeddings"], config["attention_bias"], config["mlp_bias"]) == (
        False,
        True,
        True,
    )
    assert config["dtype"] == "float16"


class TestFamilies:
    """Model types, query scales, windows and RoPE settings that follow from the metadata."""

    def test_a_llama_with_a_window_is_a_mistral(self, tmp_path: Path) -> None:
        blueprint = load_blueprint(write_gguf_file(tmp_path, attention__sliding_window=128))
        assert gguf_config(tmp_path / "m.gguf")["model_type"] == "mistral"
        assert blueprint.windows == (128, 128)

    def test_a_llama_with_experts_is_a_mixtral(self, tmp_path: Path) -> None:
        config = gguf_config(write_gguf_file(tmp_path, expert_count=8, expert_used_count=3))
        values = [config[key] for key in ("model_type", "num_local_experts", "num_experts_per_tok")]
        assert values == ["mixtral", 8, 3]
        assert config["sliding_window"] is None

    @pytest.mark.parametrize(
        ("family", "num_layers", "query_scale"), [("gemma2", 46, 48), ("gemma3", 62, 48), ("gemma2", 26, 16)]
    )
    def test_the_query_scale_of_the_largest_gemmas_is_the_hidden_size_per_head(
        self, tmp_path: Path, family: str, num_layers: int, query_scale: int
    ) -> None:
        """The query scale of all smaller models is the head size, 16 in this test."""
        file = write_gguf_file(
            tmp_path, family, block_count=num_layers, embedding_length=192, attention__key_length=16
        )
        assert gguf_config(file)["query_pre_attn_scalar"] == query_scale

    @pytest.mark.parametrize(
        ("pattern", "full_attention_layers"),
        [(None, (5,)), (2, (1, 3, 5)), ([True, False, True, True, True, True], (1,))],
    )
    def test_the_pattern_selects_layers_with_full_attention_in_gemma_3(
        self, tmp_path: Path, pattern: int | list[bool] | None, full_attention_layers: tuple[int, ...]
    ) -> None:
        metadata = {} if pattern is None else {"attention__sliding_window_pattern": pattern}
        blueprint = load_blueprint(
            write_gguf_file(tmp_path, "gemma3", block_count=6, attention__sliding_window=32, **metadata)
        )
        assert [layer for layer, window in enumerate(blueprint.windows) if window is None] == list(
            full_attention_layers
        )
        assert [layer for layer, rope in enumerate(blueprint.rotary_indices) if rope == 0] == list(
            full_attention_layers
        )
        assert [rotary.base for rotary in blueprint.rotaries] == [1_000_000.0, 10_000.0]

    def test_gemma_3_scales_only_the_rope_of_full_attention(self, tmp_path: Path) -> None:
        metadata = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base": 5e5}
        blueprint = load_blueprint(write_gguf_file(tmp_path, "gemma3", rope__freq_base_swa=77.0, **metadata))
        assert [(rotary.kind, rotary.base) for rotary in blueprint.rotaries] == [
            ("linear", 5e5),
            ("default", 77.0),
        ]


GEMMA4_SIZES = {
    "block_count": 4,
    "attention__head_count": 8,
    "attention__head_count_kv": [4, 2, 4, 2],
    "attention__key_length": 32,
    "attention__value_length": 32,
    "attention__key_length_swa": 16,
    "attention__sliding_window": 64,
    "attention__sliding_window_pattern": [True, False, True, False],
    "attention__shared_kv_layers": 2,
    "feed_forward_length": [96, 96, 192, 192],
    "embedding_length_per_layer_input": 24,
    "final_logit_softcapping": 30.0,
}
GEMMA4_TENSORS = {
    "per_layer_token_embd.weight": np.zeros((10, 96), np.float32),
    "rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, np.float32),
}


class TestGemma4:
    """Settings of single layers in Gemma 4."""

    def test_layers_have_their_own_sizes(self, tmp_path: Path) -> None:
        tensors = GEMMA4_TENSORS | {"blk.1.attn_v.weight": np.zeros((64, 64), np.float32)}
        config = HuggingFaceConfig.from_checkpoint(
            write_gguf_file(tmp_path, "gemma4", tensors=tensors, **GEMMA4_SIZES)
        )
        layers = layer_configs(config)
        assert [layer.kv_heads for layer in layers] == [4, 2, 4, 2]
        assert [layer.head_dim for layer in layers] == [16, 32, 16, 32]
        assert [layer.window for layer in layers] == [64, None, 64, None]
        assert [layer.cache_layer for layer in layers] == [0, 1, 0, 1]
        assert not any(layer.are_values_keys for layer in layers)
        assert config.flag("use_double_wide_mlp")
        assert (config.integer("intermediate_size"), config.integer("vocab_size_per_layer_input")) == (96, 10)
        full_rotary, sliding_rotary = rotary_configs(config, layers)
        assert (full_rotary.kind, full_rotary.parameters["partial_rotary_factor"]) == ("proportional", 0.25)
        assert (full_rotary.base, sliding_rotary.base) == (1_000_000.0, 10_000.0)

    def test_values_are_keys_without_a_value_projection(self, tmp_path: Path) -> None:
        changes = {
            "attention__shared_kv_layers": 0,
            "feed_forward_length": 96,
            "embedding_length_per_layer_input": 0,
            "expert_count": 8,
            "expert_used_count": 2,
            "expert_feed_forward_length": 48,
        }
        file = write_gguf_file(
            tmp_path,
            "gemma4",
            tensors={"blk.0.attn_v.weight": np.zeros((64, 64), np.float32)},
            **GEMMA4_SIZES | changes,
        )
        config = HuggingFaceConfig.from_checkpoint(file)
        assert [layer.are_values_keys for layer in layer_configs(config)] == [False, True, False, True]
        assert not config.flag("use_double_wide_mlp")
        keys = ("num_experts", "top_k_experts", "moe_intermediate_size")
        assert [config.integer(key) for key in keys] == [8, 2, 48]
        assert rotary_configs(config, layer_configs(config))[0].parameters["partial_rotary_factor"] == 1

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"attention__shared_kv_layers": 4}, "shared_kv_layers must be a whole number below 4, was 4"),
            ({"attention__head_count_kv": [4, 2]}, "head_count_kv must be a whole number .* array of 4"),
            ({"attention__head_count_kv": [4, 2, 0, 2]}, "head_count_kv must be a whole number"),
            ({"block_count": 5}, "sliding_window_pattern must have 5 elements, has 4"),
            ({"rope__dimension_count": 16}, "rope.dimension_count must be the head size, 32"),
            ({"feed_forward_length": [96, 96, 96, 192]}, "feed_forward_length must be equal in all layers"),
            ({"feed_forward_length": [96, 48, 192, 192]}, "feed_forward_length must be equal in all layers"),
        ],
    )
    def test_invalid_sizes_are_refused(self, tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
        file = write_gguf_file(tmp_path, "gemma4", tensors=GEMMA4_TENSORS, **GEMMA4_SIZES | changes)
        with pytest.raises(CheckpointError, match=problem):
            gguf_config(file)

    @pytest.mark.parametrize(
        "factors",
        [[1.0] * 4 + [8.0] * 12, [1e30] * 16, [1.0] * 2 + [1e30] * 6, [1e30] * 12 + [1.0] * 4],
        ids=("other factors", "no rotation", "another length", "last pairs"),
    )
    def test_other_frequency_factors_are_refused(self, tmp_path: Path, factors: list[float]) -> None:
        file = write_gguf_file(
            tmp_path,
            "gemma4",
            tensors=GEMMA4_TENSORS | {"rope_freqs.weight": np.array(factors, np.float32)},
            **GEMMA4_SIZES,
        )
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must be 16 numbers: ones, then"):
            gguf_config(file)


class TestRope:
    """Scaling of the rotary embedding."""

    def test_llama_3_frequency_factors_equal_those_of_the_configuration(self, tmp_path: Path) -> None:
        """The file has one factor per pair of dimensions. config.json has four numbers that define them."""
        llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        llama3["original_max_position_embeddings"] = 64
        values = {"rope_theta": 10000.0, "max_position_embeddings": 512}
        frequencies = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
        wavelength_ratios = 64 * frequencies / (2 * torch.pi)
        blend = ((wavelength_ratios - 1) / 3).clamp(0, 1)
        factors = 1 / ((1 - blend) / 8 + blend)
        assert 1 < len(factors.unique()) < 8, "the test needs factors of low, medium and high frequencies"
        file = write_gguf_file(
            tmp_path, tensors={"rope_freqs.weight": factors.numpy()}, rope__freq_base=10000.0
        )
        actual = compute_rotary_tables(HuggingFaceConfig.from_checkpoint(file))
        expected = compute_rotary_tables(HuggingFaceConfig(values | {"rope_scaling": llama3}))
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)
        assert load_blueprint(file).max_length == 512

    @pytest.mark.parametrize("attn_factor", [None, 1.19])
    def test_longrope_factors_of_phi_3_are_read(self, tmp_path: Path, attn_factor: float | None) -> None:
        tensors = {
            f"rope_factors_{factor_set}.weight": np.linspace(1, last_factor, 8, dtype=np.float32)
            for factor_set, last_factor in (("short", 2), ("long", 30))
        }
        metadata = {} if attn_factor is None else {"rope__scaling__attn_factor": attn_factor}
        metadata["rope__scaling__original_context_length"] = 128  # type: ignore[assignment]
        (rotary,) = load_blueprint(write_gguf_file(tmp_path, "phi3", tensors=tensors, **metadata)).rotaries
        assert (rotary.kind, rotary.max_positions, rotary.max_length) == ("longrope", 128, 512)
        assert rotary.parameters["long_factor"][-1] == 30.0
        assert rotary.parameters.get("attention_factor") == attn_factor

    def test_yarn_scaling_is_read(self, tmp_path: Path) -> None:
        scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
        metadata = {f"rope__scaling__{name}": value for name, value in scaling.items()}
        file = write_gguf_file(tmp_path, "qwen2", **metadata, rope__scaling__yarn_beta_fast=16.0)
        expected = {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 16.0,
        }
        assert gguf_config(file)["rope_scaling"] == expected
        (rotary,) = load_blueprint(file).rotaries
        assert (rotary.kind, rotary.max_positions, rotary.max_length) == ("yarn", 128, 512)

    def test_the_attention_factor_of_yarn_is_converted(self, tmp_path: Path) -> None:
        scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "attn_factor": 2.0}
        file = write_gguf_file(
            tmp_path, **{f"rope__scaling__{name}": value for name, value in scaling.items()}
        )
        assert gguf_config(file)["rope_scaling"]["attention_factor"] == pytest.approx(2.2772588)

    @pytest.mark.parametrize(
        "keys",
        [{"rope__scale_linear": 4.0}, {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}],
    )
    def test_linear_scaling_is_read(self, tmp_path: Path, keys: dict[str, Any]) -> None:
        config = gguf_config(write_gguf_file(tmp_path, **keys))
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}

    def test_rotary_dimensions_can_be_fewer_than_the_head_dimensions(self, tmp_path: Path) -> None:
        (rotary,) = load_blueprint(write_gguf_file(tmp_path, "phi3", rope__dimension_count=12)).rotaries
        assert rotary.dim == 12


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"omitted_keys": ("block_count",)}, "has no llama.block_count"),
        ({"omitted_keys": ("attention.head_count",)}, "has no llama.attention.head_count"),
        ({"embedding_length": "x"}, "llama.embedding_length must be a whole number of at least 1, was 'x'"),
        ({"context_length": 0}, "llama.context_length must be a whole number of at least 1, was 0"),
        ({"attention__layer_norm_rms_epsilon": -1.0}, "must be a number above 0, was -1.0"),
        ({"rope__scaling__type": "spiral"}, "rope.scaling.type must be none, linear or yarn"),
        ({"rope__scaling__type": "yarn"}, "has no llama.rope.scaling.factor"),
        ({"rope__dimension_count": 8}, "rope.dimension_count must be the head size, 16, was 8"),
        ({"attention__value_length": 8}, "value_length must be the head size, 16, was 8"),
        ({"attention__max_alibi_bias": 8.0}, "max_alibi_bias is not supported"),
        ({"attention__causal": False}, "must be true: text generation needs causal attention"),
        ({"tensor_data_layout": "sideways"}, "tensor_data_layout is unknown, was 'sideways'"),
    ],
)
def test_missing_or_unsupported_metadata_is_refused(
    tmp_path: Path, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem) as error:
        HuggingFaceConfig.from_checkpoint(write_gguf_file(tmp_path, **keys))
    assert str(error.value).startswith(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("family", ["qwen2", "olmo2", "granite", "gemma2"])
def test_partial_rotary_dimensions_are_refused_if_the_family_has_none(tmp_path: Path, family: str) -> None:
    with pytest.raises(CheckpointError, match=r"rope\.dimension_count must be the head size, 16, was 8"):
        gguf_config(write_gguf_file(tmp_path, family, rope__dimension_count=8))


def test_an_olmo_2_with_a_window_is_an_olmo_3(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    metadata: dict[str, Any] = {f"rope__scaling__{name}": value for name, value in scaling.items()}
    metadata["attention__sliding_window_pattern"] = [True, False]
    file = write_gguf_file(tmp_path, "olmo2", attention__sliding_window=64, rope__freq_base=7e4, **metadata)
    assert gguf_config(file)["model_type"] == "olmo3"
    blueprint = load_blueprint(file)
    assert blueprint.windows == (64, None)
    rotaries = [blueprint.rotaries[rotary] for rotary in blueprint.rotary_indices]
    assert [(rotary.kind, rotary.base) for rotary in rotaries] == [("default", 7e4), ("yarn", 7e4)]


def test_a_missing_embedding_table_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen2")
    add_metadata(writer, {f"qwen2.{key}": value for key, value in SIZES.items()})
    write_and_close(writer)
    with pytest.raises(CheckpointError, match=r"has no tensor token_embd\.weight"):
        gguf_config(tmp_path / "m.gguf")


def test_ignored_keys_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        gguf_config(write_gguf_file(tmp_path, vocab_size=10))
        assert not caplog.records
        gguf_config(write_gguf_file(tmp_path, new__setting=3, other=True))
    warning = "these metadata keys are ignored: llama.new.setting, llama.other"
    assert caplog.messages == [f"{tmp_path / 'm.gguf'}: {warning}"]


def test_recommended_sampling_parameters_are_defaults(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    add_metadata(writer, {"general.sampling.temp": 0.6, "general.sampling.top_k": 20})
    add_metadata(writer, {"general.sampling.penalty_repeat": 1.05, "general.sampling.xtc_threshold": 0.1})
    write_and_close(writer)
    expected = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert gguf_generation_config(tmp_path / "m.gguf") == expected
    config = PipelineConfig.from_flat({"model_path": str(tmp_path / "m.gguf")})
    params = config.default_sampling_params(top_k=5)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.6, 5, 1.05)
