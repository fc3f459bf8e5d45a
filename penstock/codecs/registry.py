"""The registry of audio codecs.

Each codec is a folder of this package with a record `CODEC` in its ``__init__``.

Importing this module and the records does not import torch. `SupportedCodec.load` imports the code of a
codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import CheckpointError, ConfigError
from penstock.host.discovery import packages_in
from penstock.weights.hub import resolve_codec
from penstock.weights.json_files import read_json_object

if TYPE_CHECKING:
    from penstock.codecs.codec import AudioCodec
    from penstock.engine import InferenceSession


@dataclass(frozen=True, kw_only=True, slots=True)
class SupportedCodec:
    """The record of a codec. Creating a record does not import the code of the codec."""

    name: str
    """Name of the codec and of its folder."""
    detect: Callable[[Mapping[str, object]], bool]
    """Returns whether a ``config.json`` belongs to this codec."""
    codec: str
    """The subclass of `AudioCodec` as ``"module:Class"``, relative to the codec's folder.

    Its class method ``load(folder, config, session, encoding)`` reads a checkpoint.
    """
    encodings: tuple[str, ...] = ("float32",)
    """The supported encodings of the codec's large layers. The first encoding is the default."""
    example_repo_ids: tuple[str, ...] = ()
    """Hub ids of checkpoints that can be loaded."""
    package: str = ""
    """The name of the codec's package. The registry sets it."""

    def load(
        self,
        folder: Path,
        config: Mapping[str, object],
        session: InferenceSession,
        encoding: str | None = None,
    ) -> AudioCodec:
        """Read a checkpoint folder of this codec.

        Raises:
            ConfigError: the codec does not support the encoding.
            CheckpointError: ``config.json`` is invalid, or a tensor is missing or misshapen.
            UnsupportedFeatureError: the checkpoint has parts that are not implemented.
        """
        encoding = encoding or self.encodings[0]
        if encoding not in self.encodings:
            raise ConfigError(
                "codec encoding",
                f"{self.name} does not support {encoding!r}: use one of {', '.join(self.encodings)}",
            )
        module, _, name = self.codec.partition(":")
        codec_class = getattr(import_module(f"{self.package}.{module}"), name)
        codec: AudioCodec = codec_class.load(folder, config, session, encoding)
        return codec


class CodecRegistry:
    """The codecs in the folders of this package and in further folders.

    Args:
        folders: folders to search in addition to this package. Each contains one package per codec.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._extra_folders = tuple(folders)

    @property
    def codecs(self) -> tuple[SupportedCodec, ...]:
        """All records, sorted by name."""
        return tuple(self._records[name] for name in sorted(self._records))

    def detect(self, config: Mapping[str, object], path: object) -> SupportedCodec:
        """Return the codec of a checkpoint.

        Args:
            config: the content of ``config.json``.
            path: the checkpoint, for messages.

        Raises:
            CheckpointError: the checkpoint belongs to no known codec.
        """
        for codec in self.codecs:
            if codec.detect(config):
                return codec
        names = ", ".join(codec.name for codec in self.codecs) or "none"
        raise CheckpointError(
            path, f"is not a checkpoint of a known audio codec (known: {names}): use another --codec"
        )

    @cached_property
    def _records(self) -> Mapping[str, SupportedCodec]:
        records = {}
        for module in packages_in(__name__.rpartition(".")[0], self._extra_folders):
            record, name = getattr(module, "CODEC", None), module.__name__.rpartition(".")[2]
            if not isinstance(record, SupportedCodec) or record.name != name:
                raise ConfigError("codec", f"{module.__file__} must define CODEC with the name {name!r}")
            records[name] = replace(record, package=module.__name__)
        return records


CODECS = CodecRegistry()
"""The codecs of this process."""


def load_codec(
    path: str | Path,
    session: InferenceSession,
    *,
    encoding: str | None = None,
    registry: CodecRegistry = CODECS,
) -> AudioCodec:
    """Load a codec.

    Args:
        path: a folder with ``config.json`` and weights, or a model id on the Hugging Face hub.
        session: the session whose back end runs the codec.
        encoding: encoding of the large layers, one of `SupportedCodec.encodings`; by default the first.
        registry: the available codecs.

    Raises:
        CheckpointNotFoundError: there is no such folder, and no such model on the hub.
        CheckpointError: the folder is not a checkpoint of a known codec, or cannot be read.
        ConfigError: the codec does not support the encoding.
        UnsupportedFeatureError: the checkpoint has parts that are not implemented.
    """
    folder = resolve_codec(str(path))
    config = read_json_object(folder / "config.json")
    return registry.detect(config, folder).load(folder, config, session, encoding)
