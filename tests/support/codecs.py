"""Tiny codecs with random weights, and what their own packages compute (tools/write_codec_references.py)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file
from support.back_ends import all_back_ends
from torch import Tensor

from penstock.codecs import load_codec

FOLDER = Path(__file__).parents[1] / "codecs" / "references"
REFERENCES = sorted(folder.name for folder in FOLDER.iterdir())


def load_reference(
    name: str, back_end: str = "reference", folder: Path = FOLDER, encoding: str = "float32"
) -> Any:
    """Return the codec of a folder, on the operations of a back end."""
    session: Any = SimpleNamespace(ops=all_back_ends()[back_end])
    return load_codec(folder / name, session, encoding=encoding)


def expected(name: str) -> dict[str, Tensor]:
    """Return the tensors that the package of a codec computed."""
    tensors: dict[str, Tensor] = load_file(FOLDER / name / "expected.tensors")
    return tensors
