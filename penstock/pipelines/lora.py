"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): the seam through which they enter a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.kernels import LoRAInputs
from penstock.pipelines.core import TextContext


class LoRAManager(Protocol):
    """Holds adapters by name and lays out those of a batch."""

    def digest(self, adapter: str) -> bytes:
        """A digest of the adapter's weights: part of the identity of cached KV blocks."""
        ...

    def inputs(self, contexts: Sequence[TextContext], counts: np.ndarray) -> LoRAInputs | None:
        """The adapters of a batch whose contexts have ``counts [B]`` rows each; None if none is used."""
        ...
