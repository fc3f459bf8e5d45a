"""`PackedKey`: identity and path of a file of packed weights. Does not import torch."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PackedKey:
    """Identifies the packed weights of one checkpoint in one encoding."""

    checkpoint: Path
    """The folder or GGUF file of the checkpoint."""
    encoding: str
    tensor_files: tuple[Path, ...]
    """The files with the tensors of the checkpoint."""
    config: str
    """The checkpoint's ``config.json`` as JSON with sorted keys."""

    @property
    def file(self) -> Path:
        """The path of the packed weights, whether or not the file exists.

        The folder is ``$XDG_CACHE_HOME/penstock/packed``, by default ``~/.cache/penstock/packed``.
        """
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        checkpoint = self.checkpoint.absolute()
        key = hashlib.sha256(f"{checkpoint}\n{self.encoding}".encode()).hexdigest()[:16]
        return cache / "penstock" / "packed" / f"{checkpoint.name}-{self.encoding}-{key}.safetensors"
