"""The registry record of a family that runs through transformers. Imports neither torch nor transformers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.architectures.registry import SupportedArchitecture
from penstock.errors import CheckpointError, ConfigError, MissingDependencyError
from penstock.kernels.encodings import ENCODINGS
from penstock.pipelines.core import PipelineTask
from penstock.weights.checkpoint import is_gguf

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


def is_in_transformers(model_type: str) -> bool:
    """Return whether the installed transformers has a folder for a ``model_type``."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or not model_type.replace("-", "_").isidentifier():
        return False
    return (Path(spec.origin).parent / "models" / model_type.replace("-", "_")).is_dir()


def transformers_architecture(
    huggingface_config: HuggingFaceConfig, path: Path, task: PipelineTask
) -> SupportedArchitecture:
    """Return the record of a checkpoint that runs through the module of transformers.

    Raises:
        CheckpointError: the checkpoint is a GGUF file, or the task is not text generation.
        ConfigError: the weights of the checkpoint are quantized.
        MissingDependencyError: transformers is not installed.
    """
    name = str(huggingface_config.model_type)
    if find_spec("transformers") is None:
        raise MissingDependencyError("transformers", "transformers", "model_impl 'transformers'")
    if task is not PipelineTask.TEXT_GENERATION:
        raise CheckpointError(
            path,
            f"runs through transformers for {PipelineTask.TEXT_GENERATION.option} only, not {task.option}",
        )
    if is_gguf(path):
        raise CheckpointError(path, "is a GGUF file: model_impl 'transformers' reads safetensors files")
    if huggingface_config.get("quantization_config") is not None:
        raise ConfigError(
            "model_impl", f"{name} runs through transformers, where quantized weights are not supported"
        )
    return SupportedArchitecture(
        name=name,
        task=task,
        pipeline_model="penstock.architectures.transformers_model:TransformersModel",
        supported_encodings=ENCODINGS.float_names,
    )
