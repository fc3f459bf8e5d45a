"""Checkpoints that store an output head although ``tie_word_embeddings`` is true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import DECODERS, load_in_transformers, transformers_logits, write_checkpoint
from support.pipeline_steps import make_context, open_pipeline, random_tokens, step_logits

from penstock.architectures.registry import SupportedArchitecture

pytestmark = [pytest.mark.families, pytest.mark.models]

TOKENS = random_tokens(20, 130, seed=1)
HEAD_NAMES = ("lm_head.weight", "embed_out.weight")


@pytest.fixture(params=DECODERS, ids=lambda architecture: architecture.name)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a checkpoint whose head differs from its embedding table, although ``config.json`` ties them."""
    return write_untied_checkpoint(tmp_path, request.param)


def write_untied_checkpoint(folder: Path, architecture: SupportedArchitecture) -> Path:
    assert architecture.tiny_config is not None
    write_checkpoint(folder, architecture.tiny_config() | {"tie_word_embeddings": False})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def replace_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace the output head (``head``) or the embedding table (``table``) of a file; None removes it."""
    file = folder / "model.safetensors"
    stored_tensors: dict[str, Any] = load_file(file)
    for name in list(stored_tensors):
        for role in tensors.keys() & {
            "head" if name in HEAD_NAMES else "table" if is_embedding_table(name) else ""
        }:
            stored_tensors[name] = tensors[role]
    save_file({name: tensor.clone() for name, tensor in stored_tensors.items() if tensor is not None}, file)


def is_embedding_table(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))


def read_embedding_table(folder: Path) -> torch.Tensor:
    (table,) = (
        tensor for name, tensor in load_file(folder / "model.safetensors").items() if is_embedding_table(name)
    )
    return table


def read_head(folder: Path) -> tuple[str, torch.Tensor]:
    """Return the name and the tensor of the output head."""
    (head,) = (
        (name, tensor)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name in HEAD_NAMES
    )
    return head


def assert_logits_equal_transformers(folder: Path) -> torch.Tensor:
    expected = transformers_logits(load_in_transformers(folder), TOKENS)
    logits = step_logits(open_pipeline(folder), [make_context(TOKENS)])[0]
    torch.testing.assert_close(logits, expected, atol=1e-4 * max(1.0, float(expected.std())), rtol=0)
    return logits


def test_a_stored_head_is_used(checkpoint: Path) -> None:
    logits = assert_logits_equal_transformers(checkpoint)
    replace_tensors(checkpoint, head=None)
    tied_logits = assert_logits_equal_transformers(checkpoint)
    assert (logits - tied_logits).abs().max() > 1


def test_a_head_equal_to_the_table_gives_the_logits_of_a_tied_head(checkpoint: Path) -> None:
    name, _ = read_head(checkpoint)
    replace_tensors(checkpoint, head=None)
    tied_logits = step_logits(open_pipeline(checkpoint), [make_context(TOKENS)])[0]
    file = checkpoint / "model.safetensors"
    save_file(load_file(file) | {name: read_embedding_table(checkpoint).clone()}, file)
    assert torch.equal(assert_logits_equal_transformers(checkpoint), tied_logits)


def test_a_stored_head_replaces_a_missing_embedding_table(checkpoint: Path) -> None:
    _, head = read_head(checkpoint)
    replace_tensors(checkpoint, table=None)
    logits = assert_logits_equal_transformers(checkpoint)
    replace_tensors(checkpoint, head=None)
    file = checkpoint / "model.safetensors"
    names = {"gpt2": "transformer.wte.weight", "gpt_neox": "gpt_neox.embed_in.weight"}
    config = json.loads((checkpoint / "config.json").read_text())
    name = names.get(config["model_type"], "model.embed_tokens.weight")
    save_file(load_file(file) | {name: head}, file)
    assert torch.equal(step_logits(open_pipeline(checkpoint), [make_context(TOKENS)])[0], logits)
