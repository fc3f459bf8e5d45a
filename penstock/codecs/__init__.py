"""Audio codecs: `AudioCodec` converts codes to waveforms and waveforms to codes.

There is one folder per codec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names

if TYPE_CHECKING:
    from penstock.codecs.codec import AudioCodec, CodecChunk
    from penstock.codecs.registry import CODECS, CodecRegistry, SupportedCodec, load_codec

__all__ = ["CODECS", "AudioCodec", "CodecChunk", "CodecRegistry", "SupportedCodec", "load_codec"]

_MODULES = {
    **dict.fromkeys(("AudioCodec", "CodecChunk"), "penstock.codecs.codec"),
    **dict.fromkeys(("CODECS", "CodecRegistry", "SupportedCodec", "load_codec"), "penstock.codecs.registry"),
}


if not TYPE_CHECKING:  # a type checker must report names that do not exist
    # The records and the registry do not import torch. `AudioCodec` does.
    __getattr__ = lazy_names(__name__, _MODULES)
