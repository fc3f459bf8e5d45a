"""`Weights`: reads tensors by name, and reports all faults of a load in one error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.dtype import DType
from penstock.errors import WeightsError
from penstock.weights import Weights

TENSORS = {
    "embed.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "norm.weight": torch.full((4,), 2.0),
    "half.weight": torch.full((2, 2), 0.5, dtype=torch.float16),
}


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return save_and_open(tmp_path, TENSORS)


def save_and_open(folder: Path, tensors: dict[str, Tensor]) -> Weights:
    save_file(tensors, folder / "model.safetensors")
    return Weights.open(folder)


def read_all_tensors(weights: Weights) -> None:
    for name in weights.names:
        weights.tensor(name, weights.shape(name))


def test_names_shapes_types_and_sizes_are_read_from_the_file(weights: Weights) -> None:
    assert weights.names == ("embed.weight", "half.weight", "norm.weight")
    assert weights.shape("embed.weight") == (3, 4)
    assert weights.dtype("embed.weight") is DType.bfloat16
    assert "norm.weight" in weights
    assert "norm.bias" not in weights
    assert weights.num_parameters == 12 + 4 + 4
    assert weights.num_bytes == 24 + 16 + 8


def test_tensors_have_the_stored_type_and_values(weights: Weights) -> None:
    for name, tensor in TENSORS.items():
        stored_tensor = weights.tensor(name, tuple(tensor.shape))
        assert stored_tensor.dtype is tensor.dtype
        assert torch.equal(stored_tensor, tensor)
    weights.finish()


def test_writes_to_a_tensor_do_not_change_the_file(weights: Weights, tmp_path: Path) -> None:
    weights.tensor("norm.weight", (4,)).zero_()
    assert torch.equal(Weights.open(tmp_path).tensor("norm.weight", (4,)), TENSORS["norm.weight"])


def test_tensors_of_all_shards_are_read(tmp_path: Path) -> None:
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        weight_map[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, tmp_path / weight_map[name])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weights = Weights.open(tmp_path)
    for name, tensor in TENSORS.items():
        assert torch.equal(weights.tensor(name, tuple(tensor.shape)), tensor)
    weights.finish()


def test_all_faults_are_reported_in_one_error(tmp_path: Path) -> None:
    weights = save_and_open(tmp_path, {**TENSORS, "packed.weight": torch.zeros(2, dtype=torch.int8)})
    assert torch.equal(weights.tensor("lm_head.weight", (2, 3)), torch.zeros(2, 3))
    assert weights.tensor("embed.weight", (4, 3)).shape == (4, 3)
    assert weights.tensor("packed.weight", (2,)).shape == (2,)
    weights.tensor("norm.weight", (4,))
    with pytest.raises(WeightsError) as error:
        weights.finish()
    assert str(error.value) == (
        f"{tmp_path}: 1 missing: lm_head.weight; "
        "1 misshapen: embed.weight is [3, 4] where the model needs [4, 3]; "
        "1 not of a float type that can be read (F16, BF16, F32, F64): packed.weight of type I8; "
        "1 unexpected: half.weight"
    )


def test_faults_of_expect_are_reported(tmp_path: Path) -> None:
    tensors = {"kept": torch.ones(3), "long": torch.ones(4), "bytes": torch.ones(2, dtype=torch.uint8)}
    weights = save_and_open(tmp_path, tensors)
    assert weights.expect("kept", (3,))
    assert not weights.expect("long", (5,))
    assert not weights.expect("bytes", (2,))
    assert not weights.expect("absent", (1,))
    with pytest.raises(WeightsError, match=r"1 missing: absent; 1 misshapen: long .*bytes of type U8$"):
        weights.finish()


def test_eight_bit_floats_are_not_read_as_weights(tmp_path: Path) -> None:
    weights = save_and_open(tmp_path, {"w": torch.zeros(3).to(torch.float8_e4m3fn)})
    weights.tensor("w", (3,))
    with pytest.raises(WeightsError, match=r"w of type F8_E4M3$"):
        weights.finish()
    with pytest.raises(WeightsError, match="w is of type F8_E4M3, which is not supported"):
        weights.dtype("w")


def test_long_lists_in_errors_are_shortened(weights: Weights) -> None:
    read_all_tensors(weights)
    for number in range(11):
        weights.tensor(f"layer.{number}", (1,))
    with pytest.raises(WeightsError, match=r"11 missing: layer\.0, .*, layer\.7 and 3 more$"):
        weights.finish()


def test_a_much_larger_expected_shape_is_refused_at_once(weights: Weights) -> None:
    with pytest.raises(WeightsError, match=r"1 misshapen: embed\.weight is \[3, 4\] where"):
        weights.tensor("embed.weight", (2**40, 2**40))


def test_more_than_1000_missing_tensors_are_refused_at_once(weights: Weights) -> None:
    for number in range(1000):
        weights.tensor(f"layer.{number}", ())
    with pytest.raises(WeightsError, match=r"1001 missing: layer\.0, "):
        weights.tensor("layer.1000", ())


def test_tensors_that_match_a_pattern_may_be_unread(weights: Weights) -> None:
    weights.tensor("embed.weight", (3, 4))
    weights.finish(ignore=["half.*", "norm.weight"])
    with pytest.raises(WeightsError, match=r"1 unexpected: norm\.weight"):
        weights.finish(ignore=["half.*"])


def test_renamed_tensors_are_read_by_their_new_names(weights: Weights) -> None:
    renamed_weights = weights.renamed(lambda name: None if name.startswith("half") else f"model.{name}")
    assert renamed_weights.names == ("model.embed.weight", "model.norm.weight")
    assert renamed_weights.num_parameters == 16
    assert torch.equal(renamed_weights.tensor("model.norm.weight", (4,)), TENSORS["norm.weight"])
    renamed_weights.tensor("model.embed.weight", (1,))
    with pytest.raises(WeightsError, match=r"model\.embed\.weight \(embed\.weight in the file\) is \[3, 4\]"):
        renamed_weights.finish()


def test_renaming_twice_reads_the_right_tensor(weights: Weights) -> None:
    renamed_weights = weights.renamed(lambda name: f"a.{name}").renamed(lambda name: name.replace("a.", "b."))
    assert torch.equal(renamed_weights.tensor("b.norm.weight", (4,)), TENSORS["norm.weight"])


def test_two_tensors_with_the_same_new_name_are_refused(weights: Weights) -> None:
    with pytest.raises(WeightsError, match="are both read as x"):
        weights.renamed(lambda name: "x")


def test_a_renamed_view_records_its_reads_separately(weights: Weights) -> None:
    read_all_tensors(weights.renamed(lambda name: name))
    with pytest.raises(WeightsError, match="3 unexpected"):
        weights.finish()


def test_the_shape_of_a_missing_tensor_is_refused(weights: Weights) -> None:
    with pytest.raises(WeightsError, match=r"has no tensor norm\.bias"):
        weights.shape("norm.bias")


def test_a_trained_checkpoint_is_read_without_faults(shared_data: Path) -> None:
    weights = Weights.open(shared_data / "models" / "stories260K")
    assert weights.shape("model.embed_tokens.weight") == (512, 64)
    read_all_tensors(weights)
    weights.finish()
