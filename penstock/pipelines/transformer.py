"""Re-exports `penstock.architectures.transformer`."""

from __future__ import annotations

from penstock.architectures.transformer import TransformerModel

__all__ = ["TransformerModel"]
