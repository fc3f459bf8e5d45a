"""``adapter_config.json`` of a PEFT directory: the adapted layers with their ranks and scales.

The format and the matching of patterns follow PEFT (https://huggingface.co/docs/peft, ``LoraConfig``).
Unsupported settings that change results are errors. An unknown field is an error, unless its value is empty,
0, false or null. An adapter is applied exactly as it was trained, or rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, cast

from penstock.errors import CheckpointError, CheckpointNotFoundError, UnsupportedFeatureError
from penstock.weights.json_files import read_json_object

CONFIG_FILE = "adapter_config.json"

_REFUSED_FIELDS: Mapping[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "fully trained layers in addition to the adapter",
    "trainable_token_indices": "trained embeddings of some tokens",
    "target_parameters": "an adapter on a parameter that is not a linear layer",
    "layer_replication": "a model with replicated layers",
    "megatron_config": "an adapter for Megatron's layers",
    "lora_bias": "a bias in the adapter's matrices",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "an activated adapter (aLoRA)",
    "arrow_config": "routing between adapters (Arrow)",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "ensure_weight_tying": "an adapter that keeps head and embedding tied",
}
"""Maps unsupported fields, which change results when set, to the kind of adapter that uses them."""

_IGNORED_FIELDS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",  # an option of ``init_lora_weights``, which is checked
    "eva_config",
    "fan_in_fan_out",  # memory layout of the base model's weights
    "inference_mode",
    "loftq_config",
    "lora_dropout",  # used only in training
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
}
"""Fields that are not checked, because they have no effect on the results of a trained adapter."""

_READ_FIELDS = {
    "alpha_pattern",
    "bias",
    "exclude_modules",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "task_type",
    "use_rslora",
}

_SUPPORTED_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that do not change the weights of the base model."""

_HEAD = "lm_head"
DECODER_PREFIX = "model."
"""The prefix of decoder layers in the base model."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of an ``adapter_config.json`` that affect results.

    The argument ``layer`` of the methods is a layer name of the base model.
    """

    path: Path
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    target_modules: tuple[str, ...] | str | None
    exclude_modules: tuple[str, ...] | str | None
    layers_to_transform: tuple[int, ...]
    """The numbers of the blocks with adapted layers; empty for all blocks."""
    layers_pattern: tuple[str, ...]
    """Patterns for the part of a layer's name before the number of the block; empty for any name."""
    base_model: str | None
    decoder_prefix: str = DECODER_PREFIX
    """The prefix of decoder layers in PEFT's model. The patterns are compared with names of PEFT's model.

    The prefix differs from ``model.`` in models with an image encoder, in which the decoder is a submodule.
    """

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Read the ``adapter_config.json`` of a PEFT directory.

        Raises:
            CheckpointNotFoundError: the directory does not exist.
            CheckpointError: the directory contains no adapter, the file is damaged, or a field is invalid.
            UnsupportedFeatureError: the kind of adapter is not supported.
        """
        if not folder.is_dir():
            raise CheckpointNotFoundError(folder, "no such folder: give the path of a PEFT directory")
        path = folder / CONFIG_FILE
        if not path.is_file():
            raise CheckpointError(folder, f"is not a LoRA adapter: it has no {CONFIG_FILE}")
        fields = read_json_object(path)
        _refuse_unsupported(path, fields)
        return _Reader(path, fields).config()

    def with_decoder_prefix(self, decoder_prefix: str) -> AdapterConfig:
        """Return a copy of the configuration with the given `decoder_prefix`."""
        return replace(self, decoder_prefix=decoder_prefix)

    def _module(self, layer: str) -> str:
        """Return the name of a layer in PEFT's model."""
        if not layer.startswith(DECODER_PREFIX):
            return layer
        return self.decoder_prefix + layer.removeprefix(DECODER_PREFIX)

    def layer_rank(self, layer: str) -> int:
        """Return the rank of a layer's matrices."""
        return int(_first_match(self.rank_pattern, self._module(layer), self.rank))

    def layer_scale(self, layer: str) -> float:
        """Return the factor by which the product B A of a layer's matrices is multiplied.

        The factor is ``alpha / rank``, with rsLoRA ``alpha / sqrt(rank)`` (Kalajdzievski 2023,
        arXiv:2312.03732).
        """
        rank = self.layer_rank(layer)
        alpha = _first_match(self.alpha_pattern, self._module(layer), self.alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)

    def targets(self, layer: str) -> bool:
        """Return whether the adapter has matrices for a layer.

        ``target_modules`` must include the layer, ``exclude_modules`` must not include it, and
        ``layers_to_transform`` may restrict the layers further. Without ``target_modules``, no layer has
        matrices.
        """
        module = self._module(layer)
        if self.target_modules is None:
            return False
        if self.exclude_modules is not None and _includes_layer(self.exclude_modules, module):
            return False
        if self.target_modules == "all-linear":
            return module != _HEAD
        if not _includes_layer(self.target_modules, module):
            return False
        if (
            isinstance(self.target_modules, str)
            or module in self.target_modules
            or not self.layers_to_transform
        ):
            return True
        return self._layer_index(module) in self.layers_to_transform

    def _layer_index(self, module: str) -> int | None:
        """Return the number of the block that contains a module; None if no pattern matches its name."""
        patterns = [rf"(?:.*\.)?(?:{pattern})" for pattern in self.layers_pattern] or [r".*\.[^.]*"]
        for pattern in patterns:
            match = re.match(rf"{pattern}\.(?P<index>\d+)\.", module)
            if match:
                return int(match["index"])
        return None


class _Reader:
    """Reads the fields of an ``adapter_config.json`` and checks their types."""

    def __init__(self, path: Path, fields: Mapping[str, object]) -> None:
        self._path, self._fields = path, fields

    def config(self) -> AdapterConfig:
        config = AdapterConfig(
            path=self._path,
            rank=self._rank("r", self._fields.get("r", 8)),
            alpha=self._number("lora_alpha", self._fields.get("lora_alpha", 8)),
            rank_pattern={
                key: self._rank(f"rank_pattern {key!r}", rank) for key, rank in self._items("rank_pattern")
            },
            alpha_pattern={
                key: self._number(f"alpha_pattern {key!r}", alpha)
                for key, alpha in self._items("alpha_pattern")
            },
            use_rslora=self._flag("use_rslora"),
            target_modules=self._names("target_modules"),
            exclude_modules=self._names("exclude_modules"),
            layers_to_transform=self._layers_to_transform(),
            layers_pattern=self._patterns(),
            base_model=self._base_model(),
        )
        if isinstance(config.target_modules, str) and config.layers_to_transform:
            self._refuse("layers_to_transform needs a list of target_modules, not a pattern")
        self._check_patterns(config)
        return config

    def _refuse(self, problem: str) -> NoReturn:
        raise CheckpointError(self._path, problem)

    def _rank(self, name: str, value: object) -> int:
        if type(value) is not int or value < 1:
            self._refuse(f"{name} must be a whole number of at least 1, is {value!r}")
        return value

    def _number(self, name: str, value: object) -> float:
        if type(value) not in (int, float) or not abs(cast(float, value)) < float("inf"):
            self._refuse(f"{name} must be a number, is {value!r}")
        return float(cast(float, value))

    def _flag(self, name: str) -> bool:
        value = self._fields.get(name) or False
        if not isinstance(value, bool):
            self._refuse(f"{name} must be true or false, is {value!r}")
        return value

    def _items(self, name: str) -> Iterable[tuple[str, object]]:
        value = self._fields.get(name) or {}
        if not isinstance(value, dict):
            self._refuse(f"{name} must be an object, is {value!r}")
        return value.items()

    def _names(self, name: str) -> tuple[str, ...] | str | None:
        value = self._fields.get(name)
        if value is None or value == []:
            return None
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._refuse(f"{name} must be a string or a list of strings, is {value!r}")
        return tuple(value)

    def _patterns(self) -> tuple[str, ...]:
        value = self._names("layers_pattern")
        return (value,) if isinstance(value, str) else value or ()

    def _layers_to_transform(self) -> tuple[int, ...]:
        value = self._fields.get("layers_to_transform")
        value = [] if value is None else [value] if isinstance(value, int) else value
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            self._refuse(f"layers_to_transform must be a whole number or a list of them, is {value!r}")
        return tuple(value)

    def _base_model(self) -> str | None:
        value = self._fields.get("base_model_name_or_path")
        return value if isinstance(value, str) and value else None

    def _check_patterns(self, config: AdapterConfig) -> None:
        modules = (config.target_modules, config.exclude_modules)
        patterns = [*config.rank_pattern, *config.alpha_pattern, *config.layers_pattern]
        for pattern in [*patterns, *(module for module in modules if isinstance(module, str))]:
            try:
                re.compile(pattern)
            except re.error as problem:
                self._refuse(f"{pattern!r} is not a regular expression: {problem}")


def _refuse_unsupported(path: Path, fields: Mapping[str, object]) -> None:
    def refuse(feature: str, reason: str) -> NoReturn:
        raise UnsupportedFeatureError(
            feature,
            f"{path} {reason}; merge the adapter into its base model (merge_and_unload) and serve the result",
        )

    peft_type = fields.get("peft_type")
    if peft_type != "LORA":
        raise UnsupportedFeatureError(f"the adapter type {peft_type!r}", f"{path} must have peft_type 'LORA'")
    task = fields.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise UnsupportedFeatureError(f"task_type {task!r}", f"{path} is not an adapter for text generation")
    if fields.get("bias", "none") != "none":
        refuse(f"bias {fields['bias']!r}", "has biases trained with the adapter")
    for name, meaning in _REFUSED_FIELDS.items():
        if fields.get(name):
            refuse(f"{meaning} ({name})", f"sets it to {fields[name]!r}")
    init = fields.get("init_lora_weights")
    if init not in _SUPPORTED_INITS:
        refuse(f"init_lora_weights {init!r}", "was trained on a base model that this setting changes")
    known_names = {*_REFUSED_FIELDS, *_IGNORED_FIELDS, *_READ_FIELDS}
    for name, value in fields.items():
        if name not in known_names and value:
            refuse(f"the field {name!r}", f"sets it to {value!r}")


def _first_match(patterns: Mapping[str, float], layer: str, default: float) -> float:
    """Return the value of the first pattern that matches a layer's name, or a part of it that follows a dot.

    Returns ``default`` if no pattern matches.
    """
    for pattern, value in patterns.items():
        if re.match(rf"(?:.*\.)?(?:{pattern})$", layer):
            return value
    return default


def _includes_layer(names: tuple[str, ...] | str, layer: str) -> bool:
    """Return whether ``names`` includes a layer.

    A pattern must match the whole name of the layer. A name in a list must equal the name of the layer, or
    the part of the layer's name that follows one of its dots.
    """
    if isinstance(names, str):
        return re.fullmatch(names, layer) is not None
    return any(layer == name or layer.endswith(f".{name}") for name in names)
