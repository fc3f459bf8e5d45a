"""Reading the tokenizer files of a checkpoint, and errors of damaged files."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CheckpointError, MissingDependencyError
from penstock.text.tokenizer_files import read_tokenizer_files


@pytest.fixture
def folder(tmp_path: Path, shared_data: Path) -> Path:
    """Copy the tokenizer of a small checkpoint: ``</s>`` has id 2, and there are 512 tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared_data / "models" / "stories260K" / name, tmp_path)
    return tmp_path


class TestEndsOfSequence:
    def test_eos_ids_of_all_files_are_combined(self, folder: Path) -> None:
        write_json(folder / "config.json", eos_token_id=5)
        write_json(folder / "generation_config.json", eos_token_id=[7, 2, 6])
        assert read_tokenizer_files(folder).eos_token_ids == (2, 7, 6, 5)

    def test_text_config_of_a_multimodal_model_is_read(self, folder: Path) -> None:
        write_json(folder / "config.json", text_config={"eos_token_id": [9], "max_position_embeddings": 64})
        files = read_tokenizer_files(folder)
        assert (files.eos_token_ids, files.max_length) == ((2, 9), 64)

    def test_eos_tokens_are_optional(self, folder: Path) -> None:
        change_config(folder, eos_token=None)
        assert read_tokenizer_files(folder).eos_token_ids == ()

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    @pytest.mark.parametrize("value", ["</s>", [2, 2.5], True])
    def test_values_that_are_not_token_ids_are_refused(self, name: str, value: object, folder: Path) -> None:
        write_json(folder / name, eos_token_id=value)
        with pytest.raises(CheckpointError, match=rf"{name}: eos_token_id must be a token id"):
            read_tokenizer_files(folder)


class TestLimits:
    def test_limits_of_config_json_override_the_limits_of_the_tokenizer(self, folder: Path) -> None:
        assert read_tokenizer_files(folder).max_length == 512
        write_json(folder / "config.json", max_position_embeddings=128, vocab_size=600)
        files = read_tokenizer_files(folder)
        assert (files.max_length, files.vocab_size) == (128, 600)

    def test_a_huge_limit_means_no_limit(self, folder: Path) -> None:
        change_config(folder, model_max_length=1000000000000000019884624838656)
        assert read_tokenizer_files(folder).max_length is None

    def test_truncation_and_padding_are_disabled(self, folder: Path) -> None:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["truncation"] = {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        tokenizer["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None}
        tokenizer["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
        write_json(folder / "tokenizer.json", **tokenizer)
        assert len(read_tokenizer_files(folder).tokenizer.encode("one two three four five").ids) in range(
            6, 50
        )


class TestSpecialTokens:
    def test_the_special_tokens_map_overrides_the_configuration(self, folder: Path) -> None:
        write_json(folder / "special_tokens_map.json", eos_token={"content": "<unk>"}, pad_token="<s>")
        files = read_tokenizer_files(folder)
        assert files.special_tokens == {
            "bos_token": "<s>",
            "eos_token": "<unk>",
            "unk_token": "<unk>",
            "pad_token": "<s>",
        }
        assert files.eos_token_ids == (0,)

    def test_named_extra_special_tokens_are_added(self, folder: Path) -> None:
        change_config(folder, extra_special_tokens={"image_token": "<image>"})
        files = read_tokenizer_files(folder)
        assert files.special_tokens["image_token"] == "<image>"
        assert files.vocab_size == 513

    @pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
    def test_listed_special_tokens_are_added(self, key: str, folder: Path) -> None:
        change_config(folder, **{key: ["<x>", {"content": "<y>"}]})
        tokenizer = read_tokenizer_files(folder).tokenizer
        assert tokenizer.encode("<y><x>", add_special_tokens=False).ids == [513, 512]
        assert tokenizer.decode([513, 512]) == ""

    def test_tokens_of_added_tokens_decoder_are_added(self, folder: Path) -> None:
        special_token, plain_token = {"content": "<x>", "special": True}, {"content": "<y>", "special": False}
        change_config(folder, added_tokens_decoder={"513": plain_token, "512": special_token})
        tokenizer = read_tokenizer_files(folder).tokenizer
        assert tokenizer.encode("<x><y>", add_special_tokens=False).ids == [512, 513]
        assert tokenizer.decode([512, 513]) == "<y>"

    def test_the_eos_token_is_special_even_if_tokenizer_json_omits_it(self, folder: Path) -> None:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["added_tokens"] = []
        write_json(folder / "tokenizer.json", **tokenizer)
        assert read_tokenizer_files(folder).tokenizer.decode([2, 417]) == "i"


class TestInvalidFiles:
    def test_a_folder_without_a_tokenizer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"has no tokenizer\.json, and no older tokenizer"):
            read_tokenizer_files(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 3}'])
    def test_a_damaged_tokenizer_is_refused(self, text: str, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer"):
            read_tokenizer_files(folder)

    @pytest.mark.parametrize(
        "name", ["tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json"]
    )
    @pytest.mark.parametrize(
        ("text", "problem"), [("{", "is not readable as JSON"), ("[]", "must contain a JSON object")]
    )
    def test_a_damaged_configuration_is_refused(
        self, name: str, text: str, problem: str, folder: Path
    ) -> None:
        (folder / name).write_text(text)
        with pytest.raises(CheckpointError, match=rf"{name}: {problem}"):
            read_tokenizer_files(folder)

    def test_an_older_tokenizer_that_cannot_be_converted_is_refused(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("transformers")
        (tmp_path / "tokenizer.model").write_bytes(b"no model")
        with pytest.raises(CheckpointError, match="the tokenizer cannot be converted"):
            read_tokenizer_files(tmp_path)
        assert capfd.readouterr().err == ""

    def test_an_older_tokenizer_requires_transformers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        (tmp_path / "vocab.json").write_text("{}")
        with pytest.raises(MissingDependencyError, match=r"pip install 'penstock-llm\[slow-tokenizers\]'"):
            read_tokenizer_files(tmp_path)


class TestEqualToTransformers:
    """Changes of tokenizer_config.json have the same effect as in transformers."""

    TEXTS = ("Hi <s>you</s> ok", " lead", "", "\n<s>\nx", "a<x><y> b", "ﬁ  x ")

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"legacy": False},
            {"legacy": None},
            {"add_prefix_space": False},
            {"tokenizer_class": "LlamaTokenizerFast"},
            {"tokenizer_class": "PreTrainedTokenizerFast"},
            {"tokenizer_class": "PreTrainedTokenizerFast", "legacy": False},
            {"eos_token": "<x>"},
            {"additional_special_tokens": ["<x>"]},
        ],
        ids=str,
    )
    def test_tokens_and_text_equal_transformers(self, settings: dict[str, Any], folder: Path) -> None:
        transformers = pytest.importorskip("transformers")
        change_config(folder, **settings)
        expected = transformers.AutoTokenizer.from_pretrained(str(folder))
        files = read_tokenizer_files(folder)
        assert files.special_tokens == expected.special_tokens_map
        for text in self.TEXTS:
            ids = expected(text)["input_ids"]
            assert files.tokenizer.encode(text).ids == ids, text
            assert files.tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)


def write_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values))


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "tokenizer_config.json"
    write_json(path, **(json.loads(path.read_text()) | values))
