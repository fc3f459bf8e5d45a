"""Unsupported vision configurations are refused, and the error names the value; older ones are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import VISION_DECODERS
from support.pipeline_steps import open_pipeline
from support.vision import save_vision_model

from penstock.architectures.registry import SupportedArchitecture
from penstock.config import HuggingFaceConfig
from penstock.errors import ConfigError, PenstockError

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("idefics3", {"text_config": {"model_type": "mamba"}}, "mamba"),
    ("idefics3", {"vision_config": {"num_attention_heads": 5}}, "5 heads do not divide hidden_size 48"),
    ("gemma3", {"text_config": {"attn_logit_softcapping": 30.0}}, "attn_logit_softcapping"),
    ("gemma3", {"text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention"),
    ("gemma4", {"text_config": {"use_bidirectional_attention": "all"}}, "use_bidirectional_attention"),
    ("gemma4", {"vision_config": {"num_key_value_heads": 1}}, "num_key_value_heads: must be 3"),
    ("gemma4", {"vision_config": {"attention_bias": True}}, "attention_bias: must be false"),
    ("gemma4", {"vision_config": {"head_dim": 18}}, "must be a multiple of 4, was 18"),
    ("qwen2_5_vl", {"text_config": {"model_type": "qwen2"}}, "must be qwen2_5_vl_text, was 'qwen2'"),
    (
        "qwen2_5_vl",
        {"text_config": {"rope_parameters": {"mrope_section": [2, 2, 2]}}},
        r"\[2, 2, 2\] must add up to 8",
    ),
    ("qwen3_vl", {"text_config": {"rope_parameters": {"mrope_section": [2, 2]}}}, "three whole numbers"),
    ("qwen3_vl", {"text_config": {"rope_parameters": {"rope_type": "other"}}}, "unknown rope type 'other'"),
]


def find_architecture(name: str) -> SupportedArchitecture:
    (result,) = (candidate for candidate in VISION_DECODERS if candidate.name == name)
    return result


def config_values(name: str, changes: dict[str, Any]) -> HuggingFaceConfig:
    make_tiny_config = find_architecture(name).tiny_config
    assert make_tiny_config is not None
    values = make_tiny_config()
    for key, change in changes.items():
        values[key] = values[key] | change if isinstance(change, dict) else change
    return HuggingFaceConfig(values)


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=str)
def test_unsupported_configurations_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    model: Any = find_architecture(name).load_pipeline_model()
    config = config_values(name, changes)
    with pytest.raises(PenstockError, match=message):
        model.blueprint(config) and model.load_encoder(_EmptyLoader(), config)


class _EmptyLoader:
    """A loader whose methods return None, for checks that run before a tensor is read."""

    def __getattr__(self, name: str) -> Any:
        def return_none(*arguments: Any, **options: Any) -> Any:
            return None

        return return_none


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("idefics3", {"scale_factor": 3}, "3 does not divide the 4 patches"),
        ("gemma3", {"mm_tokens_per_image": 9}, "9 must be the square of a divisor of 4"),
        ("gemma3", {"mm_tokens_per_image": 8}, "8 must be the square"),
    ],
    ids=str,
)
def test_unsupported_connectors_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    model: Any = find_architecture(name).load_pipeline_model()
    with pytest.raises(ConfigError, match=message):
        model.load_encoder(_EmptyLoader(), config_values(name, changes))


def test_more_deepstack_blocks_than_layers_are_refused(tmp_path: Path) -> None:
    changes = {
        "vision_config": {"deepstack_visual_indexes": [0, 1, 2]},
        "text_config": {"num_hidden_layers": 2},
    }
    save_vision_model(find_architecture("qwen3_vl"), tmp_path, **changes)
    with pytest.raises(ConfigError, match="3 blocks for a decoder of 2 layers"):
        open_pipeline(tmp_path)


def test_older_and_shorter_configurations_are_read() -> None:
    """Files on the Hub have other keys than those that transformers writes today."""
    qwen: Any = find_architecture("qwen2_5_vl").load_pipeline_model()
    text = config_values("qwen2_5_vl", {}).section("text_config").to_dict()
    text.pop("rope_parameters")
    older_config = {
        **text,
        "model_type": "qwen2_5_vl",
        "rope_theta": 77.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {"hidden_size": 1280},
    }
    (rotary,) = qwen.blueprint(HuggingFaceConfig(older_config)).rotaries
    assert (rotary.kind, rotary.base, rotary.axes) == ("default", 77.0, (0, 0, 1, 1, 1, 2, 2, 2))
    gemma: Any = find_architecture("gemma3").load_pipeline_model()
    shorter_config = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "patch_size": 14,
            "num_attention_heads": 16,
        },
    }
    blueprint = gemma.blueprint(HuggingFaceConfig(shorter_config))
    assert (blueprint.heads, blueprint.kv_heads, blueprint.head_dim, blueprint.tied_head) == (8, 4, 256, True)
    assert [rotary.kind for rotary in blueprint.rotaries] == ["linear", "default"]
    assert gemma.max_image_rows(HuggingFaceConfig(shorter_config)) == 4096
