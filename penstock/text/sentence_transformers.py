"""Reads the sentence-transformers layout of a checkpoint: poolings, dense layers, prompts and options.

Source: https://www.sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast, get_args

from penstock.errors import CheckpointError
from penstock.pipelines.core import PoolingType

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]

SparsePooling = Literal["max", "sum"]
SparseActivation = Literal["relu", "log1p_relu"]

_POOLING_FLAGS: Mapping[str, PoolingType] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last_token",
}
_POOLING_NAMES: Mapping[str, PoolingType] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last_token",
}
_IGNORED_MODULES = ("Dropout",)


@dataclass(frozen=True, kw_only=True)
class DenseModule:
    """A linear layer after pooling, with its activation."""

    path: Path
    """The module's folder, with ``model.safetensors`` or ``pytorch_model.bin``."""
    in_features: int
    out_features: int
    bias: bool
    activation: str
    """The name of a class of ``torch.nn``, such as ``Identity`` or ``Tanh``."""


@dataclass(frozen=True, kw_only=True)
class SentenceTransformersLayout:
    """How embeddings are computed from hidden states.

    The defaults apply to a checkpoint without files of sentence-transformers.
    """

    poolings: tuple[PoolingType, ...] = ()
    """The pooling modes, whose results are concatenated. If empty, the model's default applies."""
    include_prompt: bool = True
    """Whether pooling includes the tokens of a prompt."""
    dense: tuple[DenseModule, ...] = ()
    normalize: bool = False
    sparse_pooling: SparsePooling = "max"
    """How the weights of a vocabulary token at the positions of a text are reduced to one weight."""
    sparse_activation: SparseActivation = "relu"
    """The function f in ``log(1 + f(logit))``, the weight of a token."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prompt name -> text that precedes the input."""
    default_prompt_name: str | None = None
    tasks: tuple[str, ...] = ()
    """The tasks with a LoRA adapter in the checkpoint, in the order of the adapters in each LoRA tensor.

    A prompt with the name of a task belongs to the task.
    """
    max_seq_length: int | None = None
    lower_case: bool = False
    similarity: Similarity = "cosine"
    is_present: bool = False
    """Whether ``modules.json`` lists a module; without this file, whether there is a pooling folder."""

    def prompt_for(self, role: Literal["query", "document"]) -> str | None:
        """Return the name of the prompt for queries or documents; None if the checkpoint has no such prompt.

        The prompt for documents is named document, passage, corpus or retrieval.passage. The prompt for
        queries is named query or retrieval.query.
        """
        names = ["document", "passage", "corpus", "retrieval.passage"]
        if role == "query":
            names = ["query", "retrieval.query"]
        return next((name for name in names if name in self.prompts), None)


def read_layout(checkpoint: Path) -> SentenceTransformersLayout:
    """Read the layout of a checkpoint's folder. Missing files and settings have default values.

    Raises:
        CheckpointError: a file is malformed, or a module or an option is not supported.
    """
    settings_file = checkpoint / "config_sentence_transformers.json"
    settings = _read_json_object(settings_file)
    modules = _modules(checkpoint)
    transformer_folder = checkpoint
    layout = SentenceTransformersLayout(is_present=bool(modules))
    dense: list[DenseModule] = []
    for module_type, path in modules:
        if module_type in ("Transformer", "MLMTransformer"):
            transformer_folder = path
        elif module_type == "Pooling":
            poolings, include_prompt = _poolings(path)
            layout = replace(layout, poolings=poolings, include_prompt=include_prompt)
        elif module_type == "Dense":
            dense.append(_dense(path))
        elif module_type == "Normalize":
            layout = replace(layout, normalize=True)
        elif module_type == "SpladePooling":
            pooling, activation = _sparse_pooling(path)
            layout = replace(layout, sparse_pooling=pooling, sparse_activation=activation)
        elif module_type == "MultiVectorMask":
            _check_multi_vector_mask(path)
        elif module_type not in _IGNORED_MODULES:
            raise CheckpointError(
                checkpoint / "modules.json",
                f"module {module_type!r} is not supported: use Transformer, Pooling, Dense, Normalize, "
                "MLMTransformer, SpladePooling and MultiVectorMask",
            )
    transformer_file = transformer_folder / "sentence_bert_config.json"
    transformer_settings = _read_json_object(transformer_file)
    for file, values in ((settings_file, settings), (transformer_file, transformer_settings)):
        _check_multi_vector_options(file, values)
    tasks, instructions = _tasks(checkpoint / "config.json")
    prompts = {**instructions, **_prompts(settings_file, settings)}
    return replace(
        layout,
        dense=tuple(dense),
        prompts=prompts,
        tasks=tasks,
        default_prompt_name=_default_prompt(settings_file, settings, prompts),
        max_seq_length=_max_seq_length(transformer_file, transformer_settings),
        lower_case=bool(transformer_settings.get("do_lower_case")),
        similarity=_similarity(settings_file, settings),
    )


def _modules(checkpoint: Path) -> list[tuple[str, Path]]:
    """Return (type, folder) of each module; without ``modules.json``, only of a pooling in ``1_Pooling``."""
    path = checkpoint / "modules.json"
    if not path.is_file():
        pooling = checkpoint / "1_Pooling"
        return [("Pooling", pooling)] if (pooling / "config.json").is_file() else []
    modules = _read_json(path)
    if not isinstance(modules, list) or not all(
        isinstance(module, dict) and "type" in module for module in modules
    ):
        raise CheckpointError(path, "must be a JSON list of objects with a type, one for each module")
    return [
        (str(module["type"]).rpartition(".")[2], checkpoint / module.get("path", "")) for module in modules
    ]


def _poolings(path: Path) -> tuple[tuple[PoolingType, ...], bool]:
    """Return the pooling modes of a ``Pooling`` module, and whether pooling includes the prompt."""
    config = _read_json_object(path / "config.json")
    pooling_mode = config.get("pooling_mode")
    if pooling_mode is not None:
        names = [pooling_mode] if isinstance(pooling_mode, str) else list(cast("Iterable[str]", pooling_mode))
        unknown_names = [name for name in names if name not in _POOLING_NAMES]
        if unknown_names:
            raise CheckpointError(
                path / "config.json",
                f"pooling_mode {unknown_names} is unknown: use {', '.join(_POOLING_NAMES)}",
            )
        poolings = [_POOLING_NAMES[name] for name in names]
    else:
        poolings = [kind for flag, kind in _POOLING_FLAGS.items() if config.get(flag)]
    return tuple(poolings) or ("mean",), bool(config.get("include_prompt", True))


def _sparse_pooling(path: Path) -> tuple[SparsePooling, SparseActivation]:
    file = path / "config.json"
    config = _read_json_object(file)
    pooling = config.get("pooling_strategy", "max")
    activation = config.get("activation_function", "relu")
    if pooling not in get_args(SparsePooling):
        raise CheckpointError(file, f"pooling_strategy {pooling!r} is not supported: use max or sum")
    if activation not in get_args(SparseActivation):
        raise CheckpointError(
            file, f"activation_function {activation!r} is not supported: use relu or log1p_relu"
        )
    return cast(SparsePooling, pooling), cast(SparseActivation, activation)


def _check_multi_vector_options(file: Path, values: Mapping[str, object]) -> None:
    """Raise if a multi-vector model (PyLate) has an option that changes tokens or scores."""
    for key in ("do_query_expansion", "query_expansion", "skiplist_words", "query_prefix", "document_prefix"):
        if values.get(key):
            raise CheckpointError(file, f"{key} is not supported: the scores would differ from the model's")


def _check_multi_vector_mask(path: Path) -> None:
    """Raise if the mask of a multi-vector model excludes tokens by words or by token ids."""
    file = path / "config.json"
    config = _read_json_object(file)
    for key in ("skiplist_words", "keep_only_token_ids"):
        if config.get(key):
            raise CheckpointError(file, f"{key} is not supported: remove it, so that all tokens are scored")


def _dense(path: Path) -> DenseModule:
    config = _read_json_object(path / "config.json")
    try:
        return DenseModule(
            path=path,
            in_features=int(cast(int, config["in_features"])),
            out_features=int(cast(int, config["out_features"])),
            bias=bool(config.get("bias", True)),
            activation=str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(
                "."
            )[2],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(path / "config.json", f"needs in_features and out_features: {error}") from error


def _tasks(file: Path) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Return the tasks with a LoRA adapter, and their prompts (Jina Embeddings v3); empty without tasks."""
    config = _read_json_object(file)
    tasks, prompts = config.get("lora_adaptations") or [], config.get("task_instructions") or {}
    if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
        raise CheckpointError(file, "lora_adaptations must be a list of names")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(file, "task_instructions must map names to texts")
    return tuple(tasks), {name: prompts[name] for name in tasks if name in prompts}


def _prompts(file: Path, settings: Mapping[str, object]) -> Mapping[str, str]:
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(file, "prompts must map names to texts")
    return cast("dict[str, str]", prompts)


def _default_prompt(file: Path, settings: Mapping[str, object], prompts: Mapping[str, str]) -> str | None:
    name = settings.get("default_prompt_name")
    if name is not None and name not in prompts:
        known_names = ", ".join(prompts) or "none"
        raise CheckpointError(file, f"default_prompt_name {name!r} is not among the prompts ({known_names})")
    return cast("str | None", name)


def _max_seq_length(file: Path, transformer_settings: Mapping[str, object]) -> int | None:
    value = transformer_settings.get("max_seq_length")
    if value is None or (type(value) is int and value > 0):
        return value
    raise CheckpointError(file, f"max_seq_length must be a whole number of at least 1, was {value!r}")


def _similarity(file: Path, settings: Mapping[str, object]) -> Similarity:
    kind = settings.get("similarity_fn_name") or "cosine"
    if kind not in get_args(Similarity):
        known_names = ", ".join(get_args(Similarity))
        raise CheckpointError(file, f"similarity_fn_name {kind!r} is unknown: use {known_names}")
    return cast("Similarity", kind)


def _read_json_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file; empty if the file does not exist."""
    if not path.is_file():
        return {}
    value = _read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(path, "must be a JSON object")
    return value


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(path, f"is not JSON: {error}") from error
