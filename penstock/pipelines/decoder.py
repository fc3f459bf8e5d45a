"""Re-exports `penstock.architectures.decoder`."""

from __future__ import annotations

from penstock.architectures.decoder import DecoderModel, Network, kv_dtype

__all__ = ["DecoderModel", "Network", "kv_dtype"]
