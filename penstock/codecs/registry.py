"""The audio codecs: one folder each in this package, described by the `CODEC` record in its ``__init__``.

Importing this module and the records loads no torch. `SupportedCodec.load` imports the code of a codec.
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
    """The registry's record of a codec. Creating it does not load the code of the codec."""

    name: str
    """Name of the codec and of its folder."""
    detect: Callable[[Mapping[str, object]], bool]
    """Return whether a ``config.json`` belongs to this codec."""
    codec: str
    """The `AudioCodec` as ``"module:Class"``, relative to the codec's folder.

    Its class method ``load(folder, config, session, encoding)`` reads a checkpoint.
    """
    encodings: tuple[str, ...] = ("float32",)
    """Encodings in which the codec can hold its large layers; the first one is the default."""
    example_repo_ids: tuple[str, ...] = ()
    """Hub ids of checkpoints that work."""
    package: str = ""
    """The folder as a package; the registry fills it in."""

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
        """
        encoding = encoding or self.encodings[0]
        if encoding not in self.encodings:
            raise ConfigError(
                "codec encoding",
                f"{self.name} does not run in {encoding!r}: use one of {', '.join(self.encodings)}",
            )
        module, _, name = self.codec.partition(":")
        codec_class = getattr(import_module(f"{self.package}.{module}"), name)
        codec: AudioCodec = codec_class.load(folder, config, session, encoding)
        return codec


class CodecRegistry:
    """The codecs in the folders of this package and in further folders.

    Args:
        folders: folders to search besides this package; each holds one package per codec.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._more_folders = tuple(folders)

    @property
    def codecs(self) -> tuple[SupportedCodec, ...]:
        """All records, sorted by name."""
        return tuple(self._found[name] for name in sorted(self._found))

    def detect(self, config: Mapping[str, object], path: object) -> SupportedCodec:
        """Return the codec of a checkpoint.

        Args:
            config: the content of ``config.json``.
            path: the checkpoint, for messages.

        Raises:
            CheckpointError: no codec reads this checkpoint.
        """
        for codec in self.codecs:
            if codec.detect(config):
                return codec
        names = ", ".join(one.name for one in self.codecs) or "none"
        raise CheckpointError(
            path, f"is not the checkpoint of a known audio codec (known: {names}): give another --codec"
        )

    @cached_property
    def _found(self) -> Mapping[str, SupportedCodec]:
        found = {}
        for module in packages_in(__name__.rpartition(".")[0], self._more_folders):
            record, name = getattr(module, "CODEC", None), module.__name__.rpartition(".")[2]
            if not isinstance(record, SupportedCodec) or record.name != name:
                raise ConfigError("codec", f"{module.__file__} must hold CODEC, with the name {name!r}")
            found[name] = replace(record, package=module.__name__)
        return found


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
        session: its operations compute the codec.
        encoding: encoding of the large layers, one of `SupportedCodec.encodings`; by default the first.
        registry: the codecs to choose from.

    Raises:
        CheckpointNotFoundError: there is no such folder, and no such model on the hub.
        CheckpointError: the folder is not the checkpoint of a known codec, or cannot be read.
        ConfigError: the codec does not support the encoding.
    """
    folder = resolve_codec(str(path))
    config = read_json_object(folder / "config.json")
    return registry.detect(config, folder).load(folder, config, session, encoding)
