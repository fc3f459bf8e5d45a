"""`DeviceQueue`: work on a device that runs asynchronously to the host.

A back end with asynchronous operations has a queue. The pipelines then prepare and launch a step while the
device runs the previous step::

    host    prepare 1  launch 1 | prepare 2  launch 2 | tokens of 1 | prepare 3  launch 3 | tokens of 2
    device                      | step 1 .............| step 2 .....................| step 3 .......

The tokens that step 1 samples stay on the device, where step 2 reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Submitted(ABC, Generic[T_co]):
    """The result of work that was submitted to a queue."""

    @property
    @abstractmethod
    def value(self) -> T_co:
        """The result. Its tensors can be used by work that is submitted later, and their shapes are known."""


class Fetched(ABC):
    """A tensor that is being copied to the host."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Return the tensor in host memory, after all work that it depends on has run.

        Raises:
            Exception: the error of the work. Later results of the queue are undefined.
        """


class DeviceQueue(ABC):
    """Runs work in the order in which it is submitted. One thread uses it."""

    @abstractmethod
    def submit(self, work: Callable[[], T]) -> Submitted[T]:
        """Add work: operations on tensors of the device. Its inputs from the host must be ready."""

    @abstractmethod
    def fetch(self, result: Submitted[Tensor]) -> Fetched:
        """Copy a result to the host when it is computed. Work that is submitted later does not delay it."""


def upload(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return values in host memory as a tensor of a device, without waiting for earlier work of the device.

    On a CPU the tensor shares the memory of the values. For a GPU they are copied to pinned memory first.
    """
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
