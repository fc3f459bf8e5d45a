"""Checkpoints with random weights: tensors and loading for every decoder family, and named shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.checkpoints import DECODERS, write_checkpoint

from penstock import LLM, SamplingParams
from penstock.bench.random_weights import (
    SHAPES,
    narrow_config,
    shape_config,
    tensor_shapes,
    write_random_checkpoint,
)
from penstock.errors import InputError, UnknownArchitectureError

TINY_CONFIGS = {candidate.name: candidate.tiny_config() for candidate in DECODERS if candidate.tiny_config}


def depth_key(config: dict[str, Any]) -> str:
    return "num_hidden_layers" if "num_hidden_layers" in config else "n_layer"


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_narrow_models_with_another_depth_generate_tokens(name: str, tmp_path: Path) -> None:
    depth = depth_key(TINY_CONFIGS[name])
    count = TINY_CONFIGS[name][depth]
    keys_per_layer = {
        key for key, value in TINY_CONFIGS[name].items() if isinstance(value, list) and len(value) == count
    } | {"num_kv_shared_layers"}
    config = {key: value for key, value in TINY_CONFIGS[name].items() if key not in keys_per_layer} | {
        depth: 5
    }
    narrow_values = narrow_config(config, max_length=300)
    assert narrow_values[depth] == 5
    write_random_checkpoint(tmp_path, narrow_values)
    with LLM(str(tmp_path)) as llm:
        params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        (output,) = llm.generate([[1, 2] * 130], params, use_tqdm=False)
    assert output.num_generated_tokens == 3


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_tensor_names_and_shapes_agree_with_transformers(name: str, tmp_path: Path) -> None:
    written_tensors = load_file(write_checkpoint(tmp_path, TINY_CONFIGS[name]) / "model.safetensors")
    shapes = tensor_shapes(TINY_CONFIGS[name])
    common_shapes = {key: tuple(tensor.shape) for key, tensor in written_tensors.items() if key in shapes}
    assert common_shapes == {key: shape for key, shape in shapes.items() if key in written_tensors}
    # Some families store all experts of a layer in one tensor. Penstock has a name for each expert.
    stacked_names = {
        key for key, tensor in written_tensors.items() if tensor.dim() == 3 and key not in shapes
    }
    if name != "gpt2":  # transformers adds a prefix to these names
        assert len(common_shapes) >= len(written_tensors) - 1 - len(stacked_names)


def test_weights_have_the_requested_type_and_scale_and_depend_on_the_seed(tmp_path: Path) -> None:
    config = TINY_CONFIGS["llama"] | {"dtype": "float16", "vocab_size": 70000, "hidden_size": 96}
    write_random_checkpoint(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    assert table.shape == (70000, 96), "the table has more numbers than are drawn, so that they are repeated"
    assert str(table.dtype) == "torch.float16"
    assert 0.019 < float(table.float().std()) < 0.021
    assert bool((tensors["model.norm.weight"] == 1).all())
    first_table = table.clone()
    write_random_checkpoint(tmp_path, config, seed=1)
    assert not bool(
        (load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"] == first_table).all()
    )


def test_all_matrices_differ(tmp_path: Path) -> None:
    """If matrices were equal, other engines would store them once and read less memory per step."""
    write_random_checkpoint(tmp_path, TINY_CONFIGS["llama"] | {"num_hidden_layers": 6, "hidden_size": 96})
    matrices = [tensor for tensor in load_file(tmp_path / "model.safetensors").values() if tensor.dim() > 1]
    assert len(matrices) > 30
    assert len({matrix.float().numpy().tobytes() for matrix in matrices}) == len(matrices)
    assert len({matrix.flatten()[:32].float().numpy().tobytes() for matrix in matrices}) == len(matrices)


@pytest.mark.parametrize(
    ("shape", "num_parameters"), [("l110m", 134_105_856), ("l1b", 1_100_048_384), ("q800m", 752_393_024)]
)
def test_named_shapes_have_the_stated_number_of_parameters(shape: str, num_parameters: int) -> None:
    count = 0
    for sizes in tensor_shapes(shape_config(shape)).values():
        product = 1
        for size in sizes:
            product *= size
        count += product
    assert count == num_parameters


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no shape 'x'"):
        shape_config("x")
    with pytest.raises(UnknownArchitectureError, match="'mamba'"):
        tensor_shapes({"model_type": "mamba"})
    with pytest.raises(InputError, match="not 'int8'"):
        write_random_checkpoint(tmp_path, SHAPES["l110m"] | {"dtype": "int8"})
