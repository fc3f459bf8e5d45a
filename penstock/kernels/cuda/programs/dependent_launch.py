"""Programmatic dependent launch: a program starts while the previously launched kernel still runs.

Before `wait_for_previous`, a program may read weights, inputs of a step, and results of kernels that call
none of the functions below. Such kernels end before a later kernel starts.

See "Programmatic Dependent Launch and Synchronization" in the CUDA programming guide.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def launch_next(PDL: tl.constexpr):
    """Allow the next kernel to start. The next kernel calls `wait_for_previous` before it reads results."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all previously launched kernels have ended and their results can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_next_and_wait(PDL: tl.constexpr):
    """Allow the next kernel to start, and wait for the previous kernels."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
