"""Launches Triton programs, and provides the sizes, strides and device properties that a launch needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.cuda.interpreter import ignore_overflow

_INTERPRETED_PROCESSORS = 132
"""Number of multiprocessors that `num_processors` returns for CPU tensors: the number of an H100."""


class Program(Protocol):
    """A function decorated with `triton.jit`."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return the function that runs the program for each element of a grid."""
        ...


def launch(
    program: Program,
    grid: tuple[int, ...],
    first_argument: Tensor,
    *arguments: object,
    is_dependent: bool = False,
    **options: object,
) -> None:
    """Run a program on the device of its first argument, which is a tensor.

    By default, programs are compiled without fusing a multiplication and an addition, so that they round like
    the reference kernels. Matrix products are not affected.

    Args:
        program: the program.
        grid: the grid dimensions. Nothing runs if one is 0.
        first_argument: the first argument of the program.
        *arguments: the other arguments of the program.
        is_dependent: whether the program supports programmatic dependent launch (compute capability 9.0): it
            has the constant ``PDL`` and may start while the previous kernel still runs. It must call
            `programs.dependent_launch.wait_for_previous` before it reads results of other kernels and before
            it writes.
        **options: the constants of the program, and options of Triton such as ``num_warps``, ``num_stages``.
    """
    if 0 in grid:
        return
    device = first_argument.device
    options.setdefault("enable_fp_fusion", False)
    if is_dependent:
        options["PDL"] = has_dependent_launch(device)
        if options["PDL"]:
            options["launch_pdl"] = True
    if device.type == "cuda" and device.index == torch.cuda.current_device():
        program[grid](first_argument, *arguments, **options)
        return
    with torch.cuda.device(device) if device.type == "cuda" else ignore_overflow():
        program[grid](first_argument, *arguments, **options)


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Return whether the device supports programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def power_of_two(number: int, at_least: int = 1) -> int:
    """Return the smallest power of two that is at least ``number`` and at least ``at_least``.

    ``at_least`` must be a power of two.
    """
    return max(1 << max(number - 1, 0).bit_length(), at_least)


def divide_up(number: int, divisor: int) -> int:
    """Return ``number / divisor``, rounded up."""
    return -(-number // divisor)


def has_contiguous_rows(*tensors: Tensor) -> bool:
    """Return whether the last dimension of each tensor is contiguous or has one element."""
    return all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)


def row_stride(x: Tensor) -> int:
    """Return the stride of the rows of ``x [T, F]``."""
    return int(x.stride(0))


def tensor_addresses(tensors: Sequence[Tensor]) -> Tensor:  # [n] int64
    """Return the addresses of tensors, as a tensor on the device of the first."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)
