"""The task of a checkpoint, given by --task or read from its files, and its Matryoshka dimensions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import HuggingFaceConfig, PipelineConfig
from penstock.config.task import TASK_OPTIONS, detect_task
from penstock.errors import CheckpointError, ConfigError
from penstock.pipelines.core import PipelineTask

TEXT, EMBEDDINGS = PipelineTask.TEXT_GENERATION, PipelineTask.EMBEDDINGS_GENERATION
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}


@pytest.mark.parametrize(
    ("architectures", "task"),
    [
        (["Qwen3ForCausalLM"], TEXT),
        (["GPT2LMHeadModel"], TEXT),
        (["Gemma3ForConditionalGeneration"], TEXT),
        (["BertModel"], EMBEDDINGS),
        (["Qwen3Model"], EMBEDDINGS),
        (["XLMRobertaForSequenceClassification"], EMBEDDINGS),
        (["DistilBertForMaskedLM"], EMBEDDINGS),
        (["BertForPreTraining"], EMBEDDINGS),
        (["SomethingElse"], TEXT),
        ([], TEXT),
        (None, TEXT),
    ],
)
def test_the_task_follows_from_architectures(
    tmp_path: Path, architectures: list[str] | None, task: PipelineTask
) -> None:
    assert detect_task(tmp_path, HuggingFaceConfig({"architectures": architectures})) is task


def test_sentence_transformers_files_precede_architectures(tmp_path: Path) -> None:
    config = HuggingFaceConfig({"architectures": ["Qwen3ForCausalLM"]})
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "another.Library"}]))
    assert detect_task(tmp_path, config) is TEXT
    (tmp_path / "modules.json").write_text(json.dumps([TRANSFORMER]))
    assert detect_task(tmp_path, config) is EMBEDDINGS
    (tmp_path / "modules.json").unlink()
    (tmp_path / "1_Pooling").mkdir()
    assert detect_task(tmp_path, config) is TEXT
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    assert detect_task(tmp_path, config) is EMBEDDINGS


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '{"type": "sentence_transformers.models.Transformer"}'])
def test_malformed_modules_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"modules\.json: (is not JSON|must be a JSON list with one object per module)"
    ):
        detect_task(tmp_path, HuggingFaceConfig({}))


@pytest.mark.parametrize("value", ["BertModel", [1]])
def test_malformed_architectures_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"architectures in config\.json must be a list of names"):
        detect_task(tmp_path, HuggingFaceConfig({"architectures": value}))


@pytest.mark.parametrize("task", PipelineTask)
@pytest.mark.parametrize("attribute", ["option", "value"])
def test_the_task_setting_is_parsed(task: PipelineTask, attribute: str) -> None:
    model = PipelineConfig.from_flat({"model_path": "/missing", "task": getattr(task, attribute)}).model
    assert (model.task, model.pipeline_task) == (task.option, task)


def test_auto_reads_the_task_from_the_checkpoint() -> None:
    model = PipelineConfig.from_flat({"model_path": "demo"}).model
    assert (model.task, model.pipeline_task) == ("auto", TEXT)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task: must be one of auto, text-generation, .*, was 'chat'"):
        PipelineConfig.from_flat({"task": "chat"})


@pytest.mark.parametrize(
    ("config_values", "option", "expected"),
    [
        ({}, {}, ()),
        ({"is_matryoshka": True}, {}, None),
        ({"is_matryoshka": False}, {}, ()),
        ({"matryoshka_dimensions": [32, 64]}, {}, (32, 64)),
        ({"is_matryoshka": True, "matryoshka_dimensions": [32]}, {}, (32,)),
        ({"matryoshka_dimensions": [32, 64]}, {"matryoshka_dimensions": "16, 8"}, (16, 8)),
    ],
)
def test_trained_dimensions_are_read_from_the_setting_or_config_json(
    tmp_path: Path, config_values: dict[str, Any], option: dict[str, str], expected: tuple[int, ...] | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **config_values}))
    (tmp_path / "model.safetensors").touch()
    config = PipelineConfig.from_flat({"model_path": str(tmp_path), **option})
    assert config.model.trained_dimensions == expected


@pytest.mark.parametrize("text", ["64,x", "0", "-1"])
def test_malformed_matryoshka_dimensions_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be whole numbers of at least 1, such as 64,128,256"):
        PipelineConfig.from_flat({"matryoshka_dimensions": text})


def test_every_task_is_an_option() -> None:
    assert TASK_OPTIONS == ("auto", *(task.option for task in PipelineTask))
