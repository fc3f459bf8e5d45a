"""Settings in ``config.json`` that a family does not support are errors."""

from __future__ import annotations

from typing import Any

import pytest
from support.checkpoints import DECODERS

from penstock.architectures.gpt2.config import GPT2Config
from penstock.config import HuggingFaceConfig
from penstock.errors import CheckpointError, ConfigError

SLIDING = ["sliding_attention"] * 3
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def read(family: str, changes: dict[str, Any]) -> Any:
    """Return the blueprint of an architecture's tiny configuration with these changes."""
    (architecture,) = (one for one in DECODERS if one.name == family)
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
        ("llama", {"layer_types": SLIDING}, "layer_types: has sliding_attention, which this family"),
        (
            "llama",
            {"layer_types": ["chunked_attention"] * 3},
            "layer_types: 'chunked_attention' is not known",
        ),
        ("llama", {"layer_types": SLIDING[:2]}, "layer_types: must be a list of 3 names"),
        ("mistral", {"layer_types": ["full_attention", *SLIDING[1:]]}, "layer_types: must all be sliding"),
        ("mistral", {"layer_types": SLIDING, "sliding_window": None}, "layer_types: must all be full"),
        ("qwen2", {"use_sliding_window": False, "layer_types": SLIDING}, "use_sliding_window: is not true"),
        ("qwen3", {"rope_scaling": {"rope_type": "mrope"}}, "unknown rope type 'mrope'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: must be a list of 4 zeros and ones"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers: must be a list of 4 zeros and ones"),
        ("smollm3", {"layer_types": [*SLIDING, "full_attention"]}, "use_sliding_window: is not true"),
        ("phi3", {"layer_types": SLIDING, "sliding_window": None}, "layer_types: must all be full"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: is true"),
        ("gemma2", {"sliding_window": None}, "sliding_window: is null, and some layers"),
        ("gemma2", {"hidden_activation": "tanh"}, "hidden_activation: 'tanh' is not known"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: is true"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: must be null"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: must hold full_att"),
        ("gpt2", {"n_head": 5}, "n_head: 5 heads do not divide n_embd 48"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: is true"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function: 'tanh' is not known"),
    ],
)
def test_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(family, changes)


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
    ],
)
def test_no_numbers(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(family, changes)


def test_phi3_calls_longrope_by_older_names() -> None:
    known, *older = (
        read("phi3", {"rope_scaling": LONGROPE | {"type": kind}}) for kind in ("longrope", "su", "yarn")
    )
    for one in older:
        assert [rotary.kind for rotary in one.rotaries] == ["longrope"]
        assert one.max_length == known.max_length


def test_a_window_as_long_as_the_context_is_ignored() -> None:
    assert read("mistral", {"sliding_window": 256}).windows == (None,) * 3
    assert read("mistral", {"sliding_window": 255}).windows == (255,) * 3


def test_gemma3_uses_the_maximum_length_of_its_file() -> None:
    """Gemma 3 gives the length after rope scaling; older Llama models give the length before it."""
    stretched = read("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert stretched.max_length == 256
    assert read("llama", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}).max_length == 2048
