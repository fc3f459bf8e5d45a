"""The registry finds architectures by folder and loads them on request."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.architectures.registry import PIPELINE_REGISTRY, PipelineRegistry, SupportedArchitecture
from penstock.config import HuggingFaceConfig
from penstock.errors import CheckpointError, ConfigError, UnknownArchitectureError, UnsupportedTaskError
from penstock.kernels import ENCODINGS
from penstock.pipelines.core import PipelineTask
from penstock.pipelines.tasks import TASKS

TOY_RECORD = """
from penstock.pipelines.core import PipelineTask
from penstock.architectures.registry import SupportedArchitecture

ARCHITECTURE = SupportedArchitecture(
    name={name!r},
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Model",
    supported_encodings=("float32",),
)
"""


def write_architecture_folder(parent: Path, folder: str, name: str) -> None:
    (parent / folder).mkdir()
    (parent / folder / "__init__.py").write_text(TOY_RECORD.format(name=name))
    (parent / folder / "config.py").write_text(f"SIZE = {len(name)}\n")
    (parent / folder / "model.py").write_text("from .config import SIZE\n\nclass Model:\n    size = SIZE\n")


def make_config(model_type: Any) -> HuggingFaceConfig:
    return HuggingFaceConfig({"model_type": model_type})


@pytest.fixture
def registry(tmp_path: Path) -> PipelineRegistry:
    write_architecture_folder(tmp_path, "toy", "toy")
    write_architecture_folder(tmp_path, "with_dash", "with-dash")
    (tmp_path / "no_package").mkdir()
    (tmp_path / "a_module.py").write_text("raise RuntimeError('not a folder')")
    return PipelineRegistry([tmp_path])


def build_architecture(name: str = "hand-made", model: str | type = dict) -> SupportedArchitecture:
    return SupportedArchitecture(
        name=name,
        task=PipelineTask.TEXT_GENERATION,
        pipeline_model=model,
        supported_encodings=("float32",),
    )


def test_each_folder_is_an_architecture(registry: PipelineRegistry) -> None:
    names = [architecture.name for architecture in registry.architectures]
    assert {"toy", "with-dash"} <= set(names)
    assert names == sorted(names)
    assert len(names) == len(PIPELINE_REGISTRY.architectures) + 2


def test_a_model_is_loaded_only_on_request(registry: PipelineRegistry) -> None:
    architecture = registry.retrieve_architecture(make_config("toy"), "checkpoint")
    assert f"{architecture.package}.model" not in sys.modules
    model = architecture.load_pipeline_model()
    assert (model.__name__, model.size) == ("Model", 3)


def test_a_model_type_with_a_hyphen_is_found(registry: PipelineRegistry) -> None:
    architecture = registry.retrieve_architecture(make_config("with-dash"), "checkpoint")
    assert architecture.load_pipeline_model().size == 9


def test_retrieving_an_architecture_imports_no_other(registry: PipelineRegistry, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert registry.retrieve_architecture(make_config("toy"), "checkpoint").name == "toy"


def test_the_error_for_an_unknown_architecture_names_the_nearest(registry: PipelineRegistry) -> None:
    with pytest.raises(UnknownArchitectureError, match="did you mean toy") as error:
        registry.retrieve_architecture(make_config("toyy"), "/some/checkpoint")
    assert str(error.value).startswith("/some/checkpoint: architecture 'toyy' is not known (known: ")
    assert {"toy", "with-dash", "llama"} <= set(error.value.known)


@pytest.mark.parametrize("model_type", ["", "..", "toy/..", None, 3])
def test_a_model_type_that_cannot_be_a_folder_is_unknown(registry: PipelineRegistry, model_type: Any) -> None:
    with pytest.raises(UnknownArchitectureError):
        registry.retrieve_architecture(make_config(model_type), "checkpoint")


def test_a_checkpoint_without_a_model_type_is_refused(registry: PipelineRegistry) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: has no 'model_type'"):
        registry.retrieve_architecture(HuggingFaceConfig({}), "checkpoint")


def test_an_unsupported_encoding_is_refused(registry: PipelineRegistry) -> None:
    assert registry.retrieve_architecture(make_config("toy"), "x", encoding="float32").name == "toy"
    with pytest.raises(ConfigError, match=r"toy does not run in 'bfloat16': use one of float32, or a model"):
        registry.retrieve_architecture(make_config("toy"), "x", encoding="bfloat16")


def test_a_missing_or_misplaced_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "__init__.py").write_text("")
    registry = PipelineRegistry([tmp_path])
    with pytest.raises(
        ConfigError, match="must define ARCHITECTURE, a SupportedArchitecture, or ARCHITECTURES"
    ):
        registry.retrieve_architecture(make_config("empty"), "x")
    write_architecture_folder(tmp_path, "elsewhere", "other")
    registry = PipelineRegistry([tmp_path])
    with pytest.raises(ConfigError, match="is of model_type 'other': its folder must be other"):
        registry.retrieve_architecture(make_config("elsewhere"), "x")


def test_a_folder_may_have_a_record_for_each_task(tmp_path: Path) -> None:
    write_architecture_folder(tmp_path, "toy", "toy")
    record = tmp_path / "toy" / "__init__.py"
    record.write_text(
        record.read_text().replace("ARCHITECTURE = ", "CHAT = ")
        + "from dataclasses import replace\n"
        + "EMBEDDER = replace(CHAT, task=PipelineTask.EMBEDDINGS_GENERATION, pipeline_model='config:Other')\n"
        + "ARCHITECTURES = (CHAT, EMBEDDER)\n"
    )
    registry = PipelineRegistry([tmp_path])
    tasks = [candidate.task for candidate in registry.architectures if candidate.name == "toy"]
    assert tasks == [PipelineTask.EMBEDDINGS_GENERATION, PipelineTask.TEXT_GENERATION]
    assert "toy" in [candidate.name for candidate in registry.of_task(PipelineTask.EMBEDDINGS_GENERATION)]
    for task, model in (
        (PipelineTask.TEXT_GENERATION, "model:Model"),
        (PipelineTask.EMBEDDINGS_GENERATION, "config:Other"),
    ):
        result = registry.retrieve_architecture(make_config("toy"), "x", task=task)
        assert (result.task, result.pipeline_model) == (task, model)
    with pytest.raises(
        UnsupportedTaskError, match=r"'toy' has no pipeline for the task audio-generation"
    ) as error:
        registry.retrieve_architecture(make_config("toy"), "x", task=PipelineTask.AUDIO_GENERATION)
    assert sorted(error.value.known) == ["embeddings-generation", "text-generation"]
    registry.register(build_architecture("toy"), allow_override=True)
    assert registry.retrieve_architecture(make_config("toy"), "x").pipeline_model is dict
    embedder = registry.retrieve_architecture(
        make_config("toy"), "x", task=PipelineTask.EMBEDDINGS_GENERATION
    )
    assert embedder.pipeline_model == "config:Other"


@pytest.mark.parametrize(
    "addition",
    ["ARCHITECTURES = (ARCHITECTURE,)\n", "ARCHITECTURES = (ARCHITECTURE,) * 2\ndel ARCHITECTURE\n"],
)
def test_contradictory_records_are_refused(tmp_path: Path, addition: str) -> None:
    write_architecture_folder(tmp_path, "toy", "toy")
    record = tmp_path / "toy" / "__init__.py"
    record.write_text(record.read_text() + addition)
    with pytest.raises(ConfigError, match="one record for each task, in ARCHITECTURES alone"):
        PipelineRegistry([tmp_path]).retrieve_architecture(make_config("toy"), "x")


def test_an_architecture_can_be_registered(registry: PipelineRegistry) -> None:
    registry.register(build_architecture())
    result = registry.retrieve_architecture(make_config("hand-made"), "x")
    assert result.load_pipeline_model() is dict
    assert result in registry.architectures


def test_a_model_class_may_be_given_as_a_module_path(registry: PipelineRegistry) -> None:
    registry.register(build_architecture(model="collections:OrderedDict"))
    result = registry.retrieve_architecture(make_config("hand-made"), "x")
    assert result.load_pipeline_model().__name__ == "OrderedDict"
    with pytest.raises(ConfigError, match="must be written module:Class"):
        build_architecture(model="collections.OrderedDict").load_pipeline_model()


@pytest.mark.parametrize("name", ["toy", "llama", "hand-made"])
def test_a_registered_name_is_refused_unless_overridden(registry: PipelineRegistry, name: str) -> None:
    registry.register(build_architecture())
    with pytest.raises(ConfigError, match=f"'{name}' is already registered"):
        registry.register(build_architecture(name, list))
    registry.register(build_architecture(name, list), allow_override=True)
    assert registry.retrieve_architecture(make_config(name), "x").load_pipeline_model() is list
    assert [candidate.name for candidate in registry.of_task(PipelineTask.TEXT_GENERATION)].count(name) == 1


MODEL_TYPES_OF_PARTS = (
    "llama4_text",
    "embedding_gemma2_text",
    "gemma4_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
"""Model types that occur only as parts of checkpoints of other types."""


@pytest.mark.parametrize(
    "architecture",
    PIPELINE_REGISTRY.architectures,
    ids=lambda architecture: f"{architecture.name}-{architecture.task.option}",
)
class TestRegisteredArchitectures:
    def test_an_architecture_is_found_by_model_type(self, architecture: SupportedArchitecture) -> None:
        result = PIPELINE_REGISTRY.retrieve_architecture(
            make_config(architecture.name), "x", task=architecture.task
        )
        assert result == architecture

    def test_the_record_is_complete(self, architecture: SupportedArchitecture) -> None:
        assert architecture.tiny_config is not None
        assert architecture.tiny_config()["model_type"] == architecture.name
        assert architecture.encodings
        assert set(architecture.encodings) <= set(ENCODINGS)
        writes_speech = "audio" in architecture.task.value or "speech" in architecture.task.value
        assert architecture.example_repo_ids or writes_speech or architecture.name in MODEL_TYPES_OF_PARTS

    def test_the_classes_load(self, architecture: SupportedArchitecture) -> None:
        from penstock.pipelines import PipelineModel

        assert issubclass(architecture.load_pipeline_model(), PipelineModel)
        tokenizer = TASKS[architecture.task].load_tokenizer_class(architecture)
        assert tokenizer.__name__.endswith("Tokenizer")
