"""`plain_names` removes the prefixes of wrappers from tensor names, and `Weights` uses the plain names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pipeline_steps import make_context, open_pipeline, step_logits
from support.tiny_llm import write_tiny_llm

from penstock.weights import Weights
from penstock.weights.names import plain_names

PLAIN_NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.10.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)


@pytest.mark.parametrize(
    "prefix", ["", "_orig_mod.", "module.", "module._orig_mod.", "language_model.", "transformer."]
)
def test_prefixes_of_wrappers_are_removed(prefix: str) -> None:
    stored_names = [prefix + name for name in PLAIN_NAMES]
    assert list(plain_names(stored_names).values()) == list(PLAIN_NAMES)


def test_the_prefix_of_a_compiled_submodule_is_removed() -> None:
    assert list(plain_names(["model.layers.3._orig_mod.mlp.up_proj.weight"]).values()) == [
        "model.layers.3.mlp.up_proj.weight"
    ]


def test_the_prefix_of_the_language_model_is_removed() -> None:
    names = [
        "model.language_model.layers.0.mlp.up_proj.weight",
        "model.language_model.norm.weight",
        "lm_head.weight",
    ]
    expected = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
    assert list(plain_names(names).values()) == expected


def test_a_model_without_a_head_gets_the_model_prefix() -> None:
    stored_names = [name.removeprefix("model.") for name in PLAIN_NAMES[:-1]]
    assert list(plain_names(stored_names).values()) == list(PLAIN_NAMES[:-1])


@pytest.mark.parametrize(
    "name",
    [
        "transformer.h.0.attn.c_attn.weight",
        "h.0.ln_1.weight",
        "wte.weight",
        "norm.weight",
        "layers.0.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "my_module.weight",
        "model.vision_tower.layers.0.weight",
    ],
)
def test_other_names_are_unchanged(name: str) -> None:
    assert plain_names([name]) == {name: name}


@pytest.mark.parametrize("prefix", ["_orig_mod.", "language_model.", "no model."])
def test_a_checkpoint_with_added_or_removed_prefixes_gives_equal_logits(tmp_path: Path, prefix: str) -> None:
    checkpoint = write_tiny_llm(tmp_path, tie_word_embeddings=True)
    file = checkpoint / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}
    save_file(tensors, file)
    expected = step_logits(open_pipeline(checkpoint), [make_context([1, 2, 3])])[0]
    if prefix == "no model.":
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    else:
        tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    save_file(tensors, file)
    assert torch.equal(step_logits(open_pipeline(checkpoint), [make_context([1, 2, 3])])[0], expected)


def test_errors_contain_plain_and_stored_names(tmp_path: Path) -> None:
    save_file({"_orig_mod.model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    weights = Weights.open(tmp_path)
    with pytest.raises(
        Exception, match=r"unexpected: model.norm.weight \(_orig_mod.model.norm.weight in the file\)"
    ):
        weights.finish()


def test_colliding_plain_names_keep_the_stored_names(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(3), "module.a.weight": torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert Weights.open(tmp_path).names == ("a.weight", "module.a.weight")


def test_a_tied_embedding_that_is_stored_as_the_head_is_found(tmp_path: Path) -> None:
    """Some writers save tied tensors once and list the other names in the metadata of the file."""
    from safetensors.torch import save_model

    class TiedModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = torch.nn.Linear(4, 6, bias=False)
            self.model = torch.nn.Module()
            self.model.embed_tokens = torch.nn.Embedding(6, 4)
            self.model.embed_tokens.weight = self.lm_head.weight

    model = TiedModel()
    save_model(model, str(tmp_path / "model.safetensors"))
    assert len(load_file(tmp_path / "model.safetensors")) == 1
    weights = Weights.open(tmp_path)
    assert weights.names == ("lm_head.weight", "model.embed_tokens.weight")
    assert torch.equal(weights.tensor("model.embed_tokens.weight", (6, 4)), model.lm_head.weight)
