"""What the files of a checkpoint hold, of whichever format they are."""

from __future__ import annotations

from pathlib import Path

from penstock.weights import gguf
from penstock.weights.gguf_names import read_gguf_headers
from penstock.weights.safetensors import TensorHeader, read_checkpoint_headers


def is_gguf(checkpoint: Path) -> bool:
    """Whether a checkpoint is a GGUF file, which holds configuration and tokenizer too, and not a folder."""
    return checkpoint.suffix.lower() == gguf.SUFFIX and not checkpoint.is_dir()


def read_tensor_headers(checkpoint: Path) -> dict[str, TensorHeader]:
    """The tensors of a checkpoint by name: of a safetensors or GGUF file, or of a folder.

    Raises:
        WeightsError: there are none, a part is missing, or a file is damaged.
        UnknownArchitectureError: it is a GGUF file of a family that nothing is known of.
    """
    return read_gguf_headers(checkpoint) if is_gguf(checkpoint) else read_checkpoint_headers(checkpoint)
