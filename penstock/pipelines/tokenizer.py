"""Re-exports `penstock.text.tokenizer`."""

from __future__ import annotations

from penstock.text.tokenizer import TextTokenizer

__all__ = ["TextTokenizer"]
