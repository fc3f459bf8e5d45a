"""Where packed weights are kept; to know it takes no torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config import ModelConfig


def packed_file(model: ModelConfig) -> Path:
    """Where the packed weights of a model in its encoding are kept, there or not: below
    ``$XDG_CACHE_HOME/penstock/packed``, by default ``~/.cache/penstock/packed``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    checkpoint = model.checkpoint.absolute()
    key = hashlib.sha256(f"{checkpoint}\n{model.encoding}".encode()).hexdigest()[:16]
    return cache / "penstock" / "packed" / f"{checkpoint.name}-{model.encoding}-{key}.safetensors"
