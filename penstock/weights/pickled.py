"""Reads tensors from pickled files of torch (``pytorch_model.bin``, ``*.pt``) without running their code."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.weights.hub import PICKLED_FILE
from penstock.weights.tensors import Weights


class PickledWeights:
    """The tensors of a file that ``torch.save`` has written. No code of the file runs (``weights_only``).

    The methods are a subset of those of `penstock.weights.Weights`.

    Raises:
        WeightsError: the file cannot be read, or is not a dictionary of tensors.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read: set[str] = set()
        self._faults: list[str] = []
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
        except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as problem:
            first_line = str(problem).strip().partition("\n")[0]
            raise WeightsError(file, f"cannot be read as tensors: {first_line}") from problem
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise WeightsError(file, "must contain a dictionary of tensors: save the state dict of the model")
        self._tensors: dict[str, Tensor] = content

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            WeightsError: there is no tensor of this name.
        """
        if name not in self._tensors:
            raise WeightsError(self._file, f"has no tensor {name}")
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor. If it is missing or has another shape, record the fault and return zeros."""
        tensor = self._tensors.get(name)
        self._read.add(name)
        if tensor is None:
            self._faults.append(f"{name} is missing")
        elif tuple(tensor.shape) != shape:
            self._faults.append(f"{name} is {list(tensor.shape)} where the model needs {list(shape)}")
        else:
            return tensor
        return torch.zeros(shape)

    def finish(self, ignore: Iterable[str] = ()) -> None:
        """Check after loading that every tensor was read, and that no tensor was missing or misshapen.

        Args:
            ignore: shell patterns of names that need not be read.

        Raises:
            WeightsError: the check failed. The message lists the missing, misshapen and unexpected tensors.
        """
        patterns = tuple(ignore)
        unread_names = sorted(self._tensors.keys() - self._read)
        unexpected = [
            name for name in unread_names if not any(fnmatchcase(name, pattern) for pattern in patterns)
        ]
        faults = self._faults + [f"{name} is unexpected" for name in unexpected]
        if faults:
            suffix = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise WeightsError(self._file, "; ".join(faults[:8]) + suffix)


FolderWeights = Weights | PickledWeights


def open_weights(folder: Path) -> FolderWeights:
    """Open the weights in a folder: safetensors files, or the pickled file if there are none.

    Raises:
        WeightsError: there are no weights, or a file is damaged.
    """
    if not any(folder.glob("*.safetensors")) and (folder / PICKLED_FILE).is_file():
        return PickledWeights(folder / PICKLED_FILE)
    return Weights.open(folder)
