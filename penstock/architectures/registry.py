"""Which architectures there are: found by folder, loaded when one is asked for.

>>> [architecture.name for architecture in PIPELINE_REGISTRY.architectures][:1]  # doctest: +SKIP
['llama']
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

from penstock.dtype import ENCODINGS
from penstock.errors import ConfigError, UnknownArchitectureError
from penstock.pipelines.core import PipelineTask

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

_BUILT_IN = "penstock.architectures"


@dataclass(frozen=True, kw_only=True)
class SupportedArchitecture:
    """What the registry knows of a model family before any of its code is loaded.

    A class may be given as ``"module:Class"``; the module is relative to the family's folder, or absolute
    where there is no folder (``package`` is None), as for one that is registered by hand.
    """

    name: str
    """The ``model_type`` in ``config.json``."""
    task: PipelineTask
    pipeline_model: str | type
    """The `PipelineModel`."""
    supported_encodings: tuple[str, ...] = ENCODINGS
    """All of them, where the network's layers come from a `penstock.nn.Loader`."""
    supported_quantizations: tuple[str, ...] = ()
    """The ``quant_method`` of checkpoints that it reads, besides those of plain floats."""
    example_repo_ids: tuple[str, ...] = ()
    """Hub ids of models known to work."""
    tokenizer: str | type = "penstock.text.tokenizer:TextTokenizer"
    """The `PipelineTokenizer`; always an absolute module."""
    tiny_config: Callable[[], dict[str, Any]] | None = None
    """Values of a ``config.json`` small enough for tests with random weights; every folder has them."""
    package: str | None = None
    """The folder as a package; the registry fills it in."""

    def load_pipeline_model(self) -> type[Any]:
        """The class of the model; loads torch."""
        return _load(self.pipeline_model, self.package)

    def load_tokenizer(self) -> type[Any]:
        """The class of the tokenizer."""
        return _load(self.tokenizer, None)

    def check_encoding(self, encoding: str) -> None:
        """Refuses an encoding that this architecture cannot run.

        Raises:
            ConfigError: lists those it can.
        """
        if encoding not in self.supported_encodings:
            raise ConfigError(
                "quantization_encoding",
                f"{self.name} does not run in {encoding!r}: use one of "
                f"{', '.join(self.supported_encodings)}, or a model of another architecture",
            )

    def check_quantization(self, huggingface_config: HuggingFaceConfig) -> None:
        """Refuses a checkpoint whose weights are quantised in a way that this architecture does not read.

        Raises:
            ConfigError: names the way, and those that it reads.
        """
        method = huggingface_config.section("quantization_config").get("quant_method")
        if method is not None and method not in self.supported_quantizations:
            known = ", ".join(("plain floats", *self.supported_quantizations))
            raise ConfigError(
                "quantization_config.quant_method",
                f"{self.name} does not read checkpoints of {method!r}: give one of {known}, as the model "
                "that this one was made from, and --quantization-encoding int8 or int4 to have it quantised "
                "as it is loaded",
            )


class PipelineRegistry:
    """The architectures of some folders, and those registered by hand.

    Args:
        folders: where to look besides Penstock's own; each holds one package a family.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._more_folders = tuple(folders)
        self._registered: dict[str, SupportedArchitecture] = {}

    @property
    def architectures(self) -> tuple[SupportedArchitecture, ...]:
        """All of them, by name."""
        known = {name: self._load_folder(name) for name in self._folders}
        found = {architecture.name: architecture for architecture in known.values()}
        return tuple(architecture for _, architecture in sorted((found | self._registered).items()))

    def retrieve_architecture(
        self, huggingface_config: HuggingFaceConfig, path: object, *, encoding: str | None = None
    ) -> SupportedArchitecture:
        """The architecture of a checkpoint, by its ``model_type``.

        Args:
            huggingface_config: the checkpoint's ``config.json``.
            path: the checkpoint, for messages.
            encoding: refused if the architecture cannot run it.

        Raises:
            UnknownArchitectureError: there is none of this type; lists those there are.
            CheckpointError: ``config.json`` names no type.
            ConfigError: the encoding is not supported, or the way in which the checkpoint is quantised.
        """
        name = str(huggingface_config.model_type)
        architecture = self._named(name)
        if architecture is None:
            known = [one.name for one in self.architectures]
            raise UnknownArchitectureError(path, name, known)
        architecture.check_quantization(huggingface_config)
        if encoding is not None:
            architecture.check_encoding(encoding)
        return architecture

    def register(self, architecture: SupportedArchitecture, allow_override: bool = False) -> None:
        """Adds an architecture that has no folder here.

        Raises:
            ConfigError: one of this name is there already, and ``allow_override`` is false.
        """
        if not allow_override and self._named(architecture.name) is not None:
            raise ConfigError(
                "architecture",
                f"{architecture.name!r} is registered already: pass allow_override=True to replace it",
            )
        self._registered[architecture.name] = architecture

    def _named(self, name: str) -> SupportedArchitecture | None:
        if name in self._registered:
            return self._registered[name]
        folder = _folder_of(name)
        return self._load_folder(folder) if folder in self._folders else None

    @cached_property
    def _folders(self) -> Mapping[str, str]:
        """Folder -> the package it is in. Only directories are listed: nothing is imported."""
        packages = [_BUILT_IN, *map(_as_package, self._more_folders)]
        return {
            module.name: package
            for package in packages
            for module in iter_modules(import_module(package).__path__)
            if module.ispkg
        }

    def _load_folder(self, folder: str) -> SupportedArchitecture:
        package = f"{self._folders[folder]}.{folder}"
        architecture = getattr(import_module(package), "ARCHITECTURE", None)
        if not isinstance(architecture, SupportedArchitecture):
            raise ConfigError("architecture", f"{package} must hold ARCHITECTURE, a SupportedArchitecture")
        if _folder_of(architecture.name) != folder:
            raise ConfigError(
                "architecture",
                f"{package} is of model_type {architecture.name!r}: its folder must be "
                f"{_folder_of(architecture.name)}",
            )
        return replace(architecture, package=package)


PIPELINE_REGISTRY = PipelineRegistry()
"""The registry of this process."""


def _folder_of(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _as_package(folder: Path) -> str:
    """A package whose modules are the folder's, under a name of its own."""
    folder = folder.resolve()  # the import system keeps where a relative one pointed to at first
    digest = blake2b(str(folder).encode(), digest_size=6).hexdigest()
    name = f"penstock_architectures_{digest}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name


def _load(target: str | type, package: str | None) -> type[Any]:
    if isinstance(target, type):
        return target
    module, colon, name = target.partition(":")
    if not colon:
        raise ConfigError("architecture", f"{target!r} must be written module:Class")
    loaded = getattr(import_module(f"{package}.{module}" if package else module), name)
    assert isinstance(loaded, type)
    return loaded
