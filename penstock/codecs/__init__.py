"""Audio codecs: `AudioCodec` turns codes into waveforms and back. One folder per codec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names

if TYPE_CHECKING:
    from penstock.codecs.codec import AudioCodec, CodecChunk
    from penstock.codecs.registry import CODECS, CodecRegistry, SupportedCodec, load_codec

__all__ = ["CODECS", "AudioCodec", "CodecChunk", "CodecRegistry", "SupportedCodec", "load_codec"]

_HOMES = {
    **dict.fromkeys(("AudioCodec", "CodecChunk"), "penstock.codecs.codec"),
    **dict.fromkeys(("CODECS", "CodecRegistry", "SupportedCodec", "load_codec"), "penstock.codecs.registry"),
}


if not TYPE_CHECKING:  # a type checker must report names that do not exist
    # Records and registry load no torch; the codec's classes do.
    __getattr__ = lazy_names(__name__, _HOMES)
