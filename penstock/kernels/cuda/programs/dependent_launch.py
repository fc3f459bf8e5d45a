"""Programmatic dependent launch: a program starts while the kernel launched before it still runs.

See https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start(PDL: tl.constexpr):
    """Let the next kernel start. It waits for the end of this one before it reads results."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until all kernels launched before have ended, and their results can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def start_and_wait(PDL: tl.constexpr):
    """Let the next kernel start, and wait for the kernels before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
