"""The registry of architectures, which finds their folders and imports them on first use.

>>> [architecture.name for architecture in PIPELINE_REGISTRY.architectures][:1]  # doctest: +SKIP
['apertus']
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, UnknownArchitectureError, UnsupportedTaskError
from penstock.kernels.encodings import ENCODINGS
from penstock.pipelines.core import PipelineTask

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig
    from penstock.media.family import VisionFamily

_BUILT_IN_PACKAGE = "penstock.architectures"


@dataclass(frozen=True, kw_only=True)
class SupportedArchitecture:
    """The registry's record of a model family and a task. Creating it does not import the family's modules.

    A field for a class contains the class itself or the text ``"module:Class"``. The module name is relative
    to the family's folder if `package` is set. It is absolute if `package` is None, for example in records
    that `PipelineRegistry.register` adds.
    """

    name: str
    """The ``model_type`` in ``config.json``."""
    task: PipelineTask
    """The task of the pipeline. A family that serves several tasks has one record for each."""
    pipeline_model: str | type
    """The class of the model, a `PipelineModel`."""
    supported_encodings: tuple[str, ...] | None = None
    """The supported encodings; None for all. A network read by a `penstock.nn.Loader` supports all."""
    example_repo_ids: tuple[str, ...] = ()
    """Hugging Face ids of example models that Penstock runs."""
    tokenizer: str | type | None = None
    """The `PipelineTokenizer`, with an absolute module name; None selects the tokenizer of the task in
    `penstock.pipelines.tasks`.

    The constructor takes the checkpoint and the keyword arguments ``chat_template`` and
    ``special_tokens_in_content``, like `penstock.text.tokenizer.TextTokenizer`."""
    media: str | type | None = None
    """The `penstock.media.family.VisionFamily` of a family that reads images.

    Its module must not import torch.

    The `pipeline_model` must then be a `penstock.architectures.vision.VisionModel`."""
    tiny_config: Callable[[], dict[str, object]] | None = None
    """Returns a small ``config.json`` for tests with random weights. All families of Penstock set it."""
    package: str | None = None
    """The package of the family's folder, set by the registry."""

    def load_pipeline_model(self) -> type[Any]:
        """Return the class of the model. Imports torch."""
        return load_class(self.pipeline_model, self.package)

    def load_media(self) -> type[VisionFamily] | None:
        """Return the class that prepares images; None for a family that reads text only."""
        return None if self.media is None else load_class(self.media, self.package)

    @property
    def encodings(self) -> tuple[str, ...]:
        """The encodings that a user can choose for models of this architecture."""
        return ENCODINGS.names if self.supported_encodings is None else self.supported_encodings

    def check_encoding(self, encoding: str) -> None:
        """Refuse an encoding that this architecture does not support.

        Raises:
            ConfigError: lists the supported encodings.
        """
        if self.supported_encodings is not None and encoding not in self.supported_encodings:
            raise ConfigError(
                "quantization_encoding",
                f"{self.name} does not run in {encoding!r}: use one of "
                f"{', '.join(self.supported_encodings)}, or a model of another architecture",
            )


def speech_architectures(
    name: str,
    pipeline_model: str,
    tiny_config: Callable[[], dict[str, object]],
    example_repo_ids: tuple[str, ...] = (),
) -> tuple[SupportedArchitecture, SupportedArchitecture]:
    """Return the records of a decoder that can generate speech: one for speech tokens, one for audio.

    Both use the family's text generation model. The speech format of the checkpoint defines the prompt and
    the speech tokens.
    """
    tasks = (PipelineTask.SPEECH_TOKEN_GENERATION, PipelineTask.AUDIO_GENERATION)
    tokens, audio = (
        SupportedArchitecture(
            name=name,
            task=task,
            pipeline_model=pipeline_model,
            example_repo_ids=example_repo_ids,
            tiny_config=tiny_config,
        )
        for task in tasks
    )
    return tokens, audio


class PipelineRegistry:
    """Finds architectures by model type and task, in folders and among the records that `register` added.

    Args:
        folders: folders to search in addition to Penstock's own. Each contains one package per family.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._extra_folders = tuple(folders)
        self._registered: dict[tuple[str, PipelineTask], SupportedArchitecture] = {}

    def __getstate__(self) -> dict[str, object]:
        # Another process must register the folders as packages again.
        return {name: value for name, value in vars(self).items() if name != "_folders"}

    @property
    def architectures(self) -> tuple[SupportedArchitecture, ...]:
        """All records, sorted by name and task."""
        records_by_key = {
            _record_key(record): record for folder in self._folders for record in self._load_folder(folder)
        }
        return tuple(record for _, record in sorted((records_by_key | self._registered).items()))

    def of_task(self, task: PipelineTask) -> tuple[SupportedArchitecture, ...]:
        """Return the records of one task, sorted by name."""
        return tuple(architecture for architecture in self.architectures if architecture.task is task)

    def retrieve_architecture(
        self,
        huggingface_config: HuggingFaceConfig,
        path: object,
        *,
        task: PipelineTask = PipelineTask.TEXT_GENERATION,
        encoding: str | None = None,
    ) -> SupportedArchitecture:
        """Return the architecture of a checkpoint, by its ``model_type`` and a task.

        Args:
            huggingface_config: the checkpoint's ``config.json``.
            path: the path of the checkpoint, for error messages.
            task: the task that the checkpoint is loaded for.
            encoding: an encoding to check; None to check none.

        Raises:
            UnknownArchitectureError: no architecture has this type; the message lists the known types.
            UnsupportedTaskError: the architecture does not support the task; the message lists its tasks.
            CheckpointError: ``config.json`` has no ``model_type``.
            ConfigError: the encoding is not supported.
        """
        name = str(huggingface_config.model_type)
        records = self._records_for_type(name)
        if not records:
            raise UnknownArchitectureError(path, name, {record.name for record in self.architectures})
        architecture = records.get(task)
        if architecture is None:
            raise UnsupportedTaskError(path, name, task.option, [record.option for record in records])
        if encoding is not None:
            architecture.check_encoding(encoding)
        return architecture

    def register(self, architecture: SupportedArchitecture, allow_override: bool = False) -> None:
        """Add an architecture that has no folder.

        Raises:
            ConfigError: the name and the task are already registered, and ``allow_override`` is false.
        """
        if not allow_override and architecture.task in self._records_for_type(architecture.name):
            raise ConfigError(
                "architecture",
                f"{architecture.name!r} is already registered for {architecture.task.option}: pass "
                "allow_override=True to replace it",
            )
        self._registered[_record_key(architecture)] = architecture

    def _records_for_type(self, name: str) -> dict[PipelineTask, SupportedArchitecture]:
        """Return the records of a model type, by task."""
        folder = _folder_name(name)
        records = list(self._load_folder(folder)) if folder in self._folders else []
        records += [record for record in self._registered.values() if record.name == name]
        return {record.task: record for record in records}

    @cached_property
    def _folders(self) -> Mapping[str, str]:
        """Map from folder name to parent package. Lists the folders without importing them."""
        packages = [_BUILT_IN_PACKAGE, *map(_as_package, self._extra_folders)]
        return {
            module.name: package
            for package in packages
            for module in iter_modules(import_module(package).__path__)
            if module.ispkg
        }

    def _load_folder(self, folder: str) -> tuple[SupportedArchitecture, ...]:
        """Return the records of a folder: its ``ARCHITECTURE`` or its ``ARCHITECTURES``."""
        package = f"{self._folders[folder]}.{folder}"
        module = vars(import_module(package))
        records = module.get("ARCHITECTURES", (module.get("ARCHITECTURE"),))
        if not isinstance(records, tuple) or not all(
            isinstance(record, SupportedArchitecture) for record in records
        ):
            raise ConfigError(
                "architecture",
                f"{package} must define ARCHITECTURE, a SupportedArchitecture, or ARCHITECTURES, a tuple",
            )
        if len({record.task for record in records}) < len(records) or {"ARCHITECTURE", "ARCHITECTURES"} <= {
            *module
        }:
            raise ConfigError(
                "architecture", f"{package} must export one record for each task, in ARCHITECTURES alone"
            )
        for record in records:
            if _folder_name(record.name) != folder:
                raise ConfigError(
                    "architecture",
                    f"{package} is of model_type {record.name!r}: its folder must be "
                    f"{_folder_name(record.name)}",
                )
        return tuple(replace(record, package=package) for record in records)


PIPELINE_REGISTRY = PipelineRegistry()
"""The registry of Penstock's architectures."""


def _record_key(architecture: SupportedArchitecture) -> tuple[str, PipelineTask]:
    return architecture.name, architecture.task


def _folder_name(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _as_package(folder: Path) -> str:
    """Register a folder as a package with a unique name, and return the name."""
    folder = folder.resolve()  # the import system caches the first target of a relative path
    digest = blake2b(str(folder).encode(), digest_size=6).hexdigest()
    name = f"penstock_architectures_{digest}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name


def load_class(target: str | type, package: str | None = None) -> type[Any]:
    """Return ``target`` if it is a class; import the class if ``target`` is the text ``"module:Class"``.

    The module name is relative to ``package`` if that is not None.

    Raises:
        ConfigError: the text does not have this form.
    """
    if isinstance(target, type):
        return target
    loaded = load_object(target, package)
    assert isinstance(loaded, type)
    return loaded


def load_object(target: str, package: str | None = None) -> Any:
    """Import and return the object that the text ``"module:name"`` names.

    The module name is relative to ``package`` if that is not None.

    Raises:
        ConfigError: the text does not have this form.
    """
    module, colon, name = target.partition(":")
    if not colon:
        raise ConfigError("architecture", f"{target!r} must be written module:Class")
    return getattr(import_module(f"{package}.{module}" if package else module), name)
