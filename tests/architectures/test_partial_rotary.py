"""``partial_rotary_factor`` is applied as in transformers, or refused where transformers fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import load_in_transformers, transformers_logits
from support.pipeline_steps import make_context, open_pipeline, random_tokens, step_logits

from penstock.errors import ConfigError

pytestmark = pytest.mark.models

FAMILIES_WITH_PARTIAL_ROTARY = (
    *("glm", "glm4", "glm4_moe", "gpt_neox", "minimax_m2", "nemotron", "phi", "stablelm"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
"""Families whose transformers model supports ``partial_rotary_factor`` with every RoPE type."""


def write_checkpoint_with_factor(
    checkpoint: Path, folder: Path, *, in_rope_parameters: bool, **parameters: Any
) -> Path:
    """Copy a checkpoint with ``partial_rotary_factor`` 0.5. Skips families without rotary embeddings."""
    config = json.loads((checkpoint / "config.json").read_text())
    ropes = config.get("rope_parameters")
    if ropes is None:
        pytest.skip("learned positions")
    for rope in ropes.values() if "full_attention" in ropes else [ropes]:
        rope.update(parameters)
        if in_rope_parameters:
            rope["partial_rotary_factor"] = 0.5
    if not in_rope_parameters:
        config["partial_rotary_factor"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    return folder


@pytest.mark.parametrize("in_rope_parameters", [True, False], ids=["in rope_parameters", "at the top level"])
def test_logits_with_partial_rotary_factor_equal_transformers(
    checkpoint: Path, tmp_path: Path, in_rope_parameters: bool
) -> None:
    folder = write_checkpoint_with_factor(
        checkpoint, tmp_path, in_rope_parameters=in_rope_parameters, rope_type="default"
    )
    tokens = random_tokens(40, 130)
    expected = transformers_logits(load_in_transformers(folder), tokens)
    logits = step_logits(open_pipeline(folder), [make_context(tokens)])[0]
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)


def test_a_factor_with_linear_rope_is_applied_or_refused_as_in_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = write_checkpoint_with_factor(
        checkpoint, tmp_path, in_rope_parameters=True, rope_type="linear", factor=2.0
    )
    if json.loads((folder / "config.json").read_text())["model_type"] in ("phi3", "phimoe"):
        pytest.skip("has no linear rope")
    tokens = random_tokens(40, 130)
    if json.loads((folder / "config.json").read_text())["model_type"] in FAMILIES_WITH_PARTIAL_ROTARY:
        expected = transformers_logits(load_in_transformers(folder), tokens)
        logits = step_logits(open_pipeline(folder), [make_context(tokens)])[0]
        torch.testing.assert_close(logits, expected, atol=1e-4 * max(1.0, float(expected.std())), rtol=0)
        return
    with pytest.raises(RuntimeError, match="must match the size"):
        transformers_logits(load_in_transformers(folder), tokens)
    with pytest.raises(ConfigError, match=r"partial_rotary_factor: is 0\.5, but with rope type 'linear'"):
        open_pipeline(folder)
