"""Audio codecs: `AudioCodec` turns codes into waveforms and back. One folder per codec."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.codecs.codec import AudioCodec, CodecChunk
    from penstock.codecs.registry import CODECS, CodecRegistry, SupportedCodec, load_codec

__all__ = ["CODECS", "AudioCodec", "CodecChunk", "CodecRegistry", "SupportedCodec", "load_codec"]


if not TYPE_CHECKING:  # a type checker must report names that do not exist

    def __getattr__(name: str) -> object:
        # Records and registry load no torch; the codec's classes do.
        if name in __all__:
            home = "codec" if name in ("AudioCodec", "CodecChunk") else "registry"
            return getattr(import_module(f"penstock.codecs.{home}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
