"""Settings of ``config.json``: refused values, older names, ignored windows, and maximum lengths."""

from __future__ import annotations

from typing import Any

import pytest
from support.checkpoints import DECODERS

from penstock.architectures.apertus.model import stored_xielu_parameters
from penstock.architectures.gpt2.config import GPT2Config
from penstock.config import HuggingFaceConfig
from penstock.errors import CheckpointError, ConfigError

SLIDING_TYPES = ["sliding_attention"] * 3
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def load_blueprint(family: str, changes: dict[str, Any]) -> Any:
    """Return the blueprint, or for gpt2 the `GPT2Config`, of a tiny configuration with these changes."""
    (architecture,) = (candidate for candidate in DECODERS if candidate.name == family)
    assert architecture.tiny_config is not None
    config = HuggingFaceConfig(architecture.tiny_config() | changes)
    if family == "gpt2":
        return GPT2Config.from_huggingface(config)
    return architecture.load_pipeline_model().blueprint(config)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads: 4 kv heads do not divide 6"),
        ("llama", {"hidden_act": "mish"}, "hidden_act: 'mish' is not known: use silu, "),
        ("llama", {"layer_types": SLIDING_TYPES}, "layer_types: has sliding_attention, which this family"),
        (
            "llama",
            {"layer_types": ["chunked_attention"] * 3},
            "layer_types: 'chunked_attention' is not known",
        ),
        ("llama", {"layer_types": SLIDING_TYPES[:2]}, "layer_types: must be a list of 3 names"),
        (
            "mistral",
            {"layer_types": ["full_attention", *SLIDING_TYPES[1:]]},
            "layer_types: must all be sliding",
        ),
        ("mistral", {"layer_types": SLIDING_TYPES, "sliding_window": None}, "layer_types: must all be full"),
        (
            "qwen2",
            {"use_sliding_window": False, "layer_types": SLIDING_TYPES},
            "use_sliding_window: must be true",
        ),
        ("qwen3", {"rope_scaling": {"rope_type": "mrope"}}, "unknown rope type 'mrope'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: must be a list of 4 zeros and ones"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers: must be a list of 4 zeros and ones"),
        ("smollm3", {"layer_types": [*SLIDING_TYPES, "full_attention"]}, "use_sliding_window: must be true"),
        ("phi3", {"layer_types": SLIDING_TYPES, "sliding_window": None}, "layer_types: must all be full"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: is true"),
        ("gemma2", {"sliding_window": None}, "sliding_window: must be a number, because some"),
        ("gemma2", {"hidden_activation": "tanh"}, "hidden_activation: 'tanh' is not known"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: is true"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: must be null"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters: may only contain full_att",
        ),
        (
            "olmo3",
            {"rope_parameters": {"rope_type": "default"}},
            "rope_parameters: may only contain full_attention",
        ),
        ("olmo3", {"sliding_window": None}, "sliding_window: must be a number, because some"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: is true"),
        ("glm", {"partial_rotary_factor": 1.5}, "partial_rotary_factor: must be at most 1"),
        ("ernie4_5", {"compression_ratio": 2.0}, "compression_ratio: must be 1, was 2.0"),
        (
            "exaone4",
            {"sliding_window_pattern": "LLX"},
            "sliding_window_pattern: must be a number or a string of the letters",
        ),
        (
            "exaone4",
            {"sliding_window": None, "layer_types": SLIDING_TYPES + SLIDING_TYPES[:1]},
            "must be true, because some",
        ),
        ("helium", {"head_dim": 16}, "head_dim: heads x head_dim must be hidden_size 48, was 6 x 16"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm: is true"),
        ("cohere2", {"sliding_window": None}, "sliding_window: must be a number, because some"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla: is true"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm: is false"),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": "x"}},
            "alpha: must be a positive number, was 'x'",
        ),
        ("apertus", {"hidden_act": "silu"}, "hidden_act: must be xielu in this family, was 'silu'"),
        (
            "apertus",
            {"rope_scaling": None, "rope_theta": 5.0},
            "rope_theta: must be 1.2e.07",
        ),
        ("apertus", {"mlp_bias": True}, "mlp_bias: is true"),
        ("apertus", {"qk_norm": False}, "qk_norm: is false"),
        ("apertus", {"post_norm": True}, "post_norm: is true"),
        (
            "starcoder2",
            {"layer_types": ["full_attention", *SLIDING_TYPES[1:]]},
            "layer_types: must all be sliding",
        ),
        ("phi", {"head_dim": 16}, "head_dim: is 16, but heads have 8 dims in this family"),
        ("stablelm", {"head_dim": 8}, "head_dim: is 8, but heads have 16 dims in this family"),
        ("gpt_neox", {"head_dim": 8}, "head_dim: is 8, but heads have 16 dims in this family"),
        ("gpt_neox", {"num_key_value_heads": 2}, "num_key_value_heads: is 2, but this family has a key for"),
        ("nemotron", {"hidden_act": "mish"}, "hidden_act: 'mish' is not known"),
        ("gpt2", {"n_head": 5}, "n_head: 5 heads do not divide n_embd 48"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: is true"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function: 'tanh' is not known"),
    ],
)
def test_unsupported_settings_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_blueprint(family, changes)


@pytest.mark.parametrize("values", [None, [0.5], [0.5, "1"], 0.5])
def test_malformed_coefficients_of_xielu_are_refused(values: object) -> None:
    config = HuggingFaceConfig({"xielu": {"alpha_p": values}})
    with pytest.raises(ConfigError, match=r"xielu\.alpha_p: must"):
        stored_xielu_parameters(config, 2)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("granite", {"residual_multiplier": -1}, "residual_multiplier must be a number above 0, was -1"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a number above 0, was 0"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a whole number of at least 1, was 0"),
        ("qwen3", {"head_dim": 2.5}, "head_dim must be a whole number"),
        (
            "qwen2",
            {"max_window_layers": -1},
            "max_window_layers must be a whole number of at least 0, was -1",
        ),
        ("qwen3", {"max_window_layers": "all"}, "max_window_layers must be a whole number .* was 'all'"),
        ("smollm3", {"no_rope_layers": [1, 0.5, 1, 1]}, "no_rope_layers must be a list of whole numbers"),
        ("phi3", {"rope_scaling": [1]}, "rope_scaling must be a JSON object"),
        ("cohere", {"logit_scale": -1}, "logit_scale must be a number above 0, was -1"),
        ("olmo", {"clip_qkv": 0}, "clip_qkv must be a number above 0, was 0"),
        ("internlm3", {"qkv_bias": 1}, "qkv_bias must be true or false"),
    ],
)
def test_values_of_a_wrong_type_or_range_are_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_blueprint(family, changes)


def test_phi3_accepts_older_names_of_longrope() -> None:
    current_blueprint, *older_blueprints = (
        load_blueprint("phi3", {"rope_scaling": LONGROPE | {"type": rope_type}})
        for rope_type in ("longrope", "su", "yarn")
    )
    for blueprint in older_blueprints:
        assert [rotary.kind for rotary in blueprint.rotaries] == ["longrope"]
        assert blueprint.max_length == current_blueprint.max_length


def test_a_window_as_long_as_the_context_is_ignored() -> None:
    assert load_blueprint("mistral", {"sliding_window": 256}).windows == (None,) * 3
    assert load_blueprint("mistral", {"sliding_window": 255}).windows == (255,) * 3


def test_gemma3_does_not_extend_its_maximum_length() -> None:
    """``max_position_embeddings`` is the length after RoPE scaling in Gemma 3, and before it in Llama."""
    scaled_blueprint = load_blueprint("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert scaled_blueprint.max_length == 256
    assert (
        load_blueprint("llama", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}).max_length == 2048
    )
