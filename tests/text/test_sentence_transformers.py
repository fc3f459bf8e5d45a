"""Reading the sentence-transformers files of a checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.tiny_embedder import write_tiny_embedder

from penstock.errors import CheckpointError
from penstock.text.sentence_transformers import SentenceTransformersLayout, read_layout

POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weighted_mean": "pooling_mode_weightedmean_tokens",
    "last_token": "pooling_mode_lasttoken",
}


def test_a_checkpoint_without_sentence_transformers_files_has_the_default_layout(tmp_path: Path) -> None:
    layout = read_layout(write_tiny_embedder(tmp_path, modules=None))
    assert layout == SentenceTransformersLayout()
    assert layout.poolings == ()
    assert not layout.is_present


@pytest.mark.parametrize("pooling", POOLING_FLAGS)
def test_a_pooling_flag_selects_the_pooling(tmp_path: Path, pooling: str) -> None:
    flags = {flag: flag == POOLING_FLAGS[pooling] for flag in POOLING_FLAGS.values()}
    assert read_layout(write_tiny_embedder(tmp_path, pooling=flags)).poolings == (pooling,)


def test_several_poolings_and_pooling_mode_names_are_read(tmp_path: Path) -> None:
    flags = {POOLING_FLAGS["max"]: True, POOLING_FLAGS["cls"]: True}
    assert read_layout(write_tiny_embedder(tmp_path / "a", pooling=flags)).poolings == ("cls", "max")
    pooling_config: dict[str, Any] = {"pooling_mode": "lasttoken"}
    assert read_layout(write_tiny_embedder(tmp_path / "b", pooling=pooling_config)).poolings == (
        "last_token",
    )
    pooling_config = {"pooling_mode": ["weightedmean", "mean"]}
    poolings = read_layout(write_tiny_embedder(tmp_path / "c", pooling=pooling_config)).poolings
    assert poolings == ("weighted_mean", "mean")


def test_a_pooling_folder_without_modules_json_is_read(tmp_path: Path) -> None:
    write_tiny_embedder(tmp_path, modules=None)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({POOLING_FLAGS["cls"]: True}))
    layout = read_layout(tmp_path)
    assert (layout.poolings, layout.is_present, layout.normalize) == (("cls",), True, False)


def test_prompts_similarity_pooling_and_limits_are_read(tmp_path: Path) -> None:
    settings = {
        "prompts": {"query": "query: ", "passage": "passage: "},
        "default_prompt_name": "passage",
        "similarity_fn_name": "dot",
    }
    write_tiny_embedder(
        tmp_path,
        pooling={POOLING_FLAGS["mean"]: True, "include_prompt": False},
        settings=settings,
        max_seq_length=20,
    )
    layout = read_layout(tmp_path)
    assert layout.prompts == settings["prompts"]
    assert layout.default_prompt_name == "passage"
    assert layout.similarity == "dot"
    assert layout.max_seq_length == 20
    assert not layout.include_prompt
    assert layout.normalize
    assert layout.prompt_for("query") == "query"
    assert layout.prompt_for("document") == "passage"
    assert read_layout(write_tiny_embedder(tmp_path / "plain")).prompt_for("query") is None


def test_dense_modules_are_read(tmp_path: Path) -> None:
    write_tiny_embedder(tmp_path, modules=("Transformer", "Pooling", "Dense", "Dropout", "Normalize"))
    folder = tmp_path / "2_Dense"
    folder.mkdir()
    config: dict[str, Any] = {"in_features": 32, "out_features": 8, "bias": False}
    (folder / "config.json").write_text(json.dumps(config))
    [dense] = read_layout(tmp_path).dense
    assert (dense.in_features, dense.out_features, dense.bias, dense.activation) == (32, 8, False, "Tanh")
    config["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "config.json").write_text(json.dumps(config))
    assert read_layout(tmp_path).dense[0].activation == "Identity"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("modules.json", "[", "modules.json: is not JSON"),
        ("modules.json", "{}", "must be a JSON list of objects with a type"),
        ("modules.json", '[{"path": ""}]', "must be a JSON list of objects with a type"),
        ("modules.json", '[{"type": "a.b.WordWeights"}]', "module 'WordWeights' is not supported: use Trans"),
        ("1_Pooling/config.json", "[1]", "must be a JSON object"),
        ("1_Pooling/config.json", '{"pooling_mode": "median"}', r"pooling_mode \['median'\] is unknown"),
        ("config_sentence_transformers.json", "nothing", "is not JSON"),
        ("config_sentence_transformers.json", '{"prompts": ["a"]}', "prompts must map names to texts"),
        ("config_sentence_transformers.json", '{"prompts": {"a": 1}}', "prompts must map names to texts"),
        ("sentence_bert_config.json", "[]", "must be a JSON object"),
        ("sentence_bert_config.json", '{"max_seq_length": "x"}', "max_seq_length must be a whole number"),
        (
            "config_sentence_transformers.json",
            '{"similarity_fn_name": "angle"}',
            "similarity_fn_name 'angle' is unknown: use cosine, dot, euclidean, manhattan",
        ),
        (
            "config_sentence_transformers.json",
            '{"default_prompt_name": "absent"}',
            "default_prompt_name 'absent' is not among the prompts",
        ),
    ],
)
def test_an_invalid_file_is_refused_with_its_name(tmp_path: Path, file: str, text: str, message: str) -> None:
    write_tiny_embedder(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=message) as error:
        read_layout(tmp_path)
    assert re.search(re.escape(str(tmp_path / file)), str(error.value))


def test_an_invalid_dense_module_is_refused_with_its_name(tmp_path: Path) -> None:
    write_tiny_embedder(tmp_path, modules=("Transformer", "Pooling", "Dense"))
    with pytest.raises(CheckpointError, match=r"2_Dense.*needs in_features and out_features"):
        read_layout(tmp_path)


@pytest.mark.parametrize("key", ["do_query_expansion", "skiplist_words", "query_prefix"])
def test_unsupported_options_of_multi_vector_models_are_refused(tmp_path: Path, key: str) -> None:
    folder = write_tiny_embedder(tmp_path)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({key: ["x"]}))
    with pytest.raises(CheckpointError, match=f"{key} is not supported"):
        read_layout(folder)
