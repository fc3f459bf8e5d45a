"""GPT-2: a checkpoint like OpenAI's, with tensor names without prefix and with stored attention masks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import load_in_transformers, transformers_logits, write_checkpoint
from support.pipeline_steps import make_context, open_pipeline, random_tokens, step_logits

from penstock.architectures.gpt2 import tiny_config
from penstock.errors import WeightsError

pytestmark = pytest.mark.models

TOKENS = random_tokens(40, 130, seed=2)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a checkpoint like OpenAI's: tensor names without prefix, and an attention mask in each layer."""
    folder = write_checkpoint(tmp_path, tiny_config())
    tensors = load_file(folder / "model.safetensors")
    assert all(name.startswith("transformer.") for name in tensors)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 256, 256).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_tensor_names_without_a_prefix_are_read_and_stored_masks_ignored(checkpoint: Path) -> None:
    logits = step_logits(open_pipeline(checkpoint), [make_context(TOKENS)])[0]
    expected = transformers_logits(load_in_transformers(checkpoint), TOKENS)
    torch.testing.assert_close(logits, expected, atol=1e-4 * max(1.0, float(expected.std())), rtol=0)


def test_an_unexpected_tensor_is_refused(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["h.0.attn.gate"] = torch.zeros(3)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"1 unexpected: transformer\.h\.0\.attn\.gate \(h\.0\.attn\.gate"):
        open_pipeline(checkpoint)
