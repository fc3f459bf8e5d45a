"""Whether the Triton programs can run on this machine, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache


def is_interpreted() -> bool:
    """Return whether programs run on CPU tensors in Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET") == "1" and _has_triton()


@cache
def can_run_on_gpu() -> bool:
    """Return whether torch finds a GPU and triton is installed. Log a warning if only triton is missing."""
    import torch

    if not torch.cuda.is_available():
        return False
    if not _has_triton():
        logging.getLogger(__name__).warning(
            "triton is not installed: the reference kernels are used, many times slower. "
            "pip install 'penstock-llm[cuda]'"
        )
        return False
    return True


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
