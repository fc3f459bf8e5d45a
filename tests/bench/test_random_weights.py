"""Checkpoints of random weights can be loaded for every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.checkpoints import DECODERS, write_checkpoint

from penstock import LLM, SamplingParams
from penstock.bench.random_weights import (
    SHAPES,
    config_of_shape,
    narrow_config,
    tensor_shapes,
    write_random_checkpoint,
)
from penstock.errors import InputError, UnknownArchitectureError

TINY = {one.name: one.tiny_config() for one in DECODERS if one.tiny_config}


def depth_of(config: dict[str, Any]) -> str:
    return "num_hidden_layers" if "num_hidden_layers" in config else "n_layer"


@pytest.mark.parametrize("name", TINY)
def test_narrow_models_of_other_depths_run(name: str, tmp_path: Path) -> None:
    depth = depth_of(TINY[name])
    count = TINY[name][depth]
    of_layers = {key for key, value in TINY[name].items() if isinstance(value, list) and len(value) == count}
    config = {key: value for key, value in TINY[name].items() if key not in of_layers} | {depth: 5}
    narrow = narrow_config(config, max_length=300)
    assert narrow[depth] == 5
    write_random_checkpoint(tmp_path, narrow)
    with LLM(str(tmp_path)) as llm:
        params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        (output,) = llm.generate([[1, 2] * 130], params, use_tqdm=False)
    assert output.num_generated_tokens == 3


@pytest.mark.parametrize("name", TINY)
def test_tensors_are_those_that_transformers_writes(name: str, tmp_path: Path) -> None:
    written = load_file(write_checkpoint(tmp_path, TINY[name]) / "model.safetensors")
    ours = tensor_shapes(TINY[name])
    same = {key: tuple(one.shape) for key, one in written.items() if key in ours}
    assert same == {key: shape for key, shape in ours.items() if key in written}
    # Some families store all experts of a layer in one tensor; Penstock reads each expert from it.
    stacked = {key for key, one in written.items() if one.dim() == 3 and key not in ours}
    if name != "gpt2":  # whose names have a prefix there
        assert len(same) >= len(written) - 1 - len(stacked)


def test_values(tmp_path: Path) -> None:
    config = TINY["llama"] | {"dtype": "float16", "vocab_size": 70000, "hidden_size": 96}
    write_random_checkpoint(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    assert table.shape == (70000, 96), "more numbers than are drawn"
    assert str(table.dtype) == "torch.float16"
    assert 0.019 < float(table.float().std()) < 0.021
    assert bool((tensors["model.norm.weight"] == 1).all())
    first = table.clone()
    write_random_checkpoint(tmp_path, config, seed=1)
    assert not bool((load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"] == first).all())


def test_no_two_matrices_are_equal(tmp_path: Path) -> None:
    """Exporters of other engines store equal matrices once, which would reduce the memory traffic."""
    write_random_checkpoint(tmp_path, TINY["llama"] | {"num_hidden_layers": 6, "hidden_size": 96})
    matrices = [one for one in load_file(tmp_path / "model.safetensors").values() if one.dim() > 1]
    assert len(matrices) > 30
    assert len({one.float().numpy().tobytes() for one in matrices}) == len(matrices)
    assert len({one.flatten()[:32].float().numpy().tobytes() for one in matrices}) == len(matrices)


@pytest.mark.parametrize(("shape", "parameters"), [("l110m", 134_105_856), ("l1b", 1_100_048_384)])
def test_named_shapes(shape: str, parameters: int) -> None:
    count = 0
    for sizes in tensor_shapes(config_of_shape(shape)).values():
        product = 1
        for size in sizes:
            product *= size
        count += product
    assert count == parameters


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no shape 'x'"):
        config_of_shape("x")
    with pytest.raises(UnknownArchitectureError, match="'mamba'"):
        tensor_shapes({"model_type": "mamba"})
    with pytest.raises(InputError, match="not 'int8'"):
        write_random_checkpoint(tmp_path, SHAPES["l110m"] | {"dtype": "int8"})
