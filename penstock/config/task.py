"""Detects the task of a checkpoint from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.config.huggingface import HuggingFaceConfig
    from penstock.pipelines.core import PipelineTask

TASK_OPTIONS = (
    "auto",
    "text-generation",
    "embeddings-generation",
    "audio-generation",
    "speech-token-generation",
)
"""The values of ``--task``: auto and each `PipelineTask`. They are written as text, because an
import of `PipelineTask` imports numpy and would slow down ``--help``."""

_TEXT_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_EMBEDDINGS_SUFFIXES = (
    "ForSequenceClassification",
    "ForMaskedLM",
    "ForPreTraining",
    "ForTextEncoding",
    "Model",
)


def detect_task(checkpoint: Path, huggingface_config: HuggingFaceConfig) -> PipelineTask:
    """Return the task of a checkpoint.

    A checkpoint with a module of sentence-transformers in ``modules.json``, or with
    ``1_Pooling/config.json``, is an embeddings model. Otherwise the first entry of ``architectures``
    determines the task. Encoders, models without a head and sequence classifiers are embeddings models.
    ``*ForCausalLM`` generates audio if the checkpoint has ``speech_config.json`` or the tokens of a speech
    format in its vocabulary. All other checkpoints generate text.

    Args:
        checkpoint: a checkpoint's folder, or a GGUF file.
        huggingface_config: the checkpoint's ``config.json``.

    Raises:
        CheckpointError: ``modules.json``, ``architectures`` or ``speech_config.json`` is malformed.
        ConfigError: ``speech_config.json`` names an unknown speech format.
    """
    from penstock.pipelines.core import PipelineTask
    from penstock.text.speech_format import is_speech_checkpoint

    if _has_sentence_transformers_modules(checkpoint) or (checkpoint / "1_Pooling" / "config.json").is_file():
        return PipelineTask.EMBEDDINGS_GENERATION
    architecture_names = huggingface_config.get("architectures") or []
    if not isinstance(architecture_names, list) or not all(
        isinstance(name, str) for name in architecture_names
    ):
        raise CheckpointError(
            checkpoint, f"architectures in config.json must be a list of names, was {architecture_names!r}"
        )
    architecture_name = architecture_names[0] if architecture_names else ""
    if not architecture_name.endswith(_TEXT_SUFFIXES) and architecture_name.endswith(_EMBEDDINGS_SUFFIXES):
        return PipelineTask.EMBEDDINGS_GENERATION
    if architecture_name.endswith("ForCausalLM") and is_speech_checkpoint(checkpoint):
        return PipelineTask.AUDIO_GENERATION
    return PipelineTask.TEXT_GENERATION


def _has_sentence_transformers_modules(checkpoint: Path) -> bool:
    path = checkpoint / "modules.json"
    if not path.is_file():
        return False
    try:
        modules = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(path, f"is not JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(path, "must be a JSON list with one object per module")
    return any(str(module.get("type")).startswith("sentence_transformers.") for module in modules)
