"""`HuggingFaceConfig`: access to the values of ``config.json``."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest

from penstock.config import HuggingFaceConfig
from penstock.errors import CheckpointError

VALUES = {
    "hidden_size": 64,
    "text_config": {"vocab_size": 10, "rope_scaling": {"factor": 8.0}},
    "layers": [{"a": 1}],
    "nothing": None,
}


@pytest.fixture
def config(tmp_path: Path) -> HuggingFaceConfig:
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    return HuggingFaceConfig.from_checkpoint(tmp_path)


def test_keys_are_attributes_and_items(config: HuggingFaceConfig) -> None:
    assert config.hidden_size == config["hidden_size"] == config.get("hidden_size") == 64
    assert config.text_config.rope_scaling.factor == 8.0
    assert config.get("text_config")["rope_scaling"].get("factor") == 8.0
    assert "hidden_size" in config
    assert "head_dim" not in config
    assert list(config) == list(VALUES)
    assert config.nothing is None


@pytest.mark.parametrize("key", ["5", "05", "005"])
def test_layer_indices_can_have_leading_zeros(key: str) -> None:
    config = HuggingFaceConfig({"per_layer_config": {"15": {"head_dim": 8}, key: {"head_dim": 16}}})
    assert config.layer_section(5).to_dict() == {"head_dim": 16}
    assert config.layer_section(15).to_dict() == {"head_dim": 8}
    assert config.layer_section(1).to_dict() == {}
    with pytest.raises(CheckpointError, match="per_layer_config: 7 must be a JSON object"):
        HuggingFaceConfig({"per_layer_config": {"7": 16}}).layer_section(7)


def test_to_dict_returns_a_deep_copy(config: HuggingFaceConfig) -> None:
    plain_values = config.to_dict()
    assert plain_values == VALUES
    assert type(plain_values["text_config"]) is dict
    plain_values["text_config"]["vocab_size"] = 11
    plain_values["layers"][0]["a"] = 2
    assert config.to_dict() == VALUES


def test_the_error_for_a_missing_key_names_key_and_file(config: HuggingFaceConfig, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        _ = config.head_dim
    assert str(error.value) == f"{tmp_path}/config.json: has no 'head_dim'"
    with pytest.raises(CheckpointError) as error:
        _ = config.text_config["head_dim"]
    assert str(error.value) == f"{tmp_path}/config.json: text_config: has no 'head_dim'"


def test_getattr_and_get_return_the_default_for_a_missing_key(config: HuggingFaceConfig) -> None:
    assert getattr(config, "head_dim", 8) == 8
    assert config.get("head_dim", 8) == 8
    assert config.get("head_dim") is None


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_error_for_a_missing_type_names_the_requested_key(key: str) -> None:
    with pytest.raises(KeyError, match=f"has no '{key}'"):
        HuggingFaceConfig({}, "config.json")[key]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_type_is_read_under_both_key_names(key: str) -> None:
    config = HuggingFaceConfig({key: "bfloat16"})
    assert config.dtype == config.torch_dtype == config.get("dtype") == "bfloat16"
    assert config.to_dict() == {key: "bfloat16"}


def test_dtype_and_torch_dtype_may_have_different_values() -> None:
    config = HuggingFaceConfig({"dtype": "float32", "torch_dtype": "float16"})
    assert (config.dtype, config.torch_dtype) == ("float32", "float16")


def test_the_configuration_can_be_copied_and_pickled(config: HuggingFaceConfig) -> None:
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config).text_config.vocab_size == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'"llama"', "must contain a JSON object, contains a str"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        HuggingFaceConfig.from_checkpoint(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read: No such file"):
        HuggingFaceConfig.from_checkpoint(tmp_path)


def test_valid_values_and_defaults_are_returned() -> None:
    config = HuggingFaceConfig({"heads": 4, "eps": 1e-5, "tied": True, "nothing": None})
    assert (
        config.integer("heads"),
        config.integer("nothing", default=7),
        config.integer("gone", default=8),
    ) == (
        4,
        7,
        8,
    )
    assert (config.number("eps", 1.0), config.number("gone", 2.5)) == (1e-5, 2.5)
    assert (config.flag("tied"), config.flag("gone"), config.flag("nothing", default=True)) == (
        True,
        False,
        True,
    )


@pytest.mark.parametrize("value", ["four", 0, -1, 2.0, True, [4], None])
def test_invalid_integers_are_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"heads must be a whole number of at least 1, was"):
        HuggingFaceConfig({"heads": value}).integer("heads")


def test_integers_out_of_range_are_refused() -> None:
    with pytest.raises(CheckpointError, match=f"heads must be at most 2147483647, was {10**30}"):
        HuggingFaceConfig({"heads": 10**30}).integer("heads")
    with pytest.raises(CheckpointError, match="layers must be at most 9, was 10"):
        HuggingFaceConfig({"layers": 10}).integer("layers", maximum=9)


@pytest.mark.parametrize("value", ["small", 0, -1e-5, float("nan"), float("inf"), False, 10**400])
def test_invalid_positive_numbers_are_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="eps must be a number above 0"):
        HuggingFaceConfig({"eps": value}).number("eps", 1.0)


def test_sections_are_configurations(config: HuggingFaceConfig) -> None:
    assert config.section("text_config").vocab_size == 10
    assert not config.section("nothing")
    assert not config.section("gone")
    with pytest.raises(CheckpointError, match="hidden_size must be a JSON object, was 64"):
        config.section("hidden_size")


def test_invalid_flags_are_refused() -> None:
    with pytest.raises(CheckpointError, match="tied must be true or false, was 1"):
        HuggingFaceConfig({"tied": 1}).flag("tied")


def test_the_vocabulary_size_is_that_of_the_text_model(config: HuggingFaceConfig) -> None:
    assert config.vocabulary_size == 10, "the value belongs to the text model of a multimodal model"
    assert HuggingFaceConfig({"vocab_size": 12}).vocabulary_size == 12
    assert HuggingFaceConfig({"vocab_size": 12, "text_config": {"a": 1}}).vocabulary_size == 12
    assert HuggingFaceConfig({}).vocabulary_size == 0


def test_optional_values_may_be_missing() -> None:
    config = HuggingFaceConfig({"window": 7, "cap": 2.5, "nothing": None, "bad": "x"})
    assert config.optional_integer("window") == 7
    assert config.optional_integer("nothing", 8) is None, "null overrides the default"
    assert config.optional_integer("gone", 8) == 8
    assert config.optional_number("cap") == 2.5
    assert config.optional_number("nothing", 1.0) is None
    assert config.optional_number("gone", 1.0) == 1.0
    with pytest.raises(CheckpointError, match="bad must be a whole number of at least 1, was 'x'"):
        config.optional_integer("bad")
    with pytest.raises(CheckpointError, match="bad must be a number above 0, was 'x'"):
        config.optional_number("bad")


def test_integers_may_have_another_minimum() -> None:
    config = HuggingFaceConfig({"first": 0})
    assert config.integer("first", minimum=0) == 0
    with pytest.raises(CheckpointError, match="first must be a whole number of at least 2, was 0"):
        config.integer("first", minimum=2)


def test_texts_and_lists_are_returned() -> None:
    config = HuggingFaceConfig({"name": "llama", "names": ["a", "b"], "numbers": [1, 0], "nothing": None})
    assert (config.text("name"), config.text("nothing", "x"), config.text("gone", "y")) == ("llama", "x", "y")
    assert config.texts("names") == ("a", "b")
    assert config.integers("numbers") == (1, 0)
    assert config.texts("nothing") is config.integers("gone") is None
    with pytest.raises(CheckpointError, match=r"has no 'gone'"):
        config.text("gone")


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("text", 4, "key must be text, was 4"),
        ("texts", "ab", "key must be a list of texts, was 'ab'"),
        ("texts", ["a", 1], r"key must be a list of texts, was \['a', 1\]"),
        ("integers", [1, 2.0], r"key must be a list of whole numbers, was \[1, 2.0\]"),
        ("integers", [True], r"key must be a list of whole numbers, was \[True\]"),
    ],
)
def test_values_of_another_type_are_refused(method: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        getattr(HuggingFaceConfig({"key": value}), method)("key")
