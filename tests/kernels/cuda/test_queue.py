"""`CudaQueue` with a fake of torch's streams: which work each copy to the host waits for.

One test needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from penstock.kernels import upload
from penstock.kernels.cuda.queue import CudaQueue, LaunchedWork, make_queue
from penstock.kernels.reference import ReferenceOps


class FakeStream:
    """A stream that counts its operations and records its waits for other streams."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.length = 0
        self.waits_for: dict[str, int] = {}

    def wait_stream(self, other: FakeStream) -> None:
        self.waits_for[other.name] = other.length


class FakeEvent:
    """A fake of `torch.cuda.Event` that records its stream and whether `synchronize` was called."""

    def __init__(self) -> None:
        self.stream: FakeStream | None = None
        self.is_synchronized = False

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        assert self.stream is not None, "the event was not recorded"
        self.is_synchronized = True


class FakeCuda:
    """A fake of the functions of `torch.cuda` that the queue may use. No function synchronizes the device."""

    def __init__(self) -> None:
        self.main = self._current = FakeStream("main")
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []

    def Stream(self, device: torch.device) -> FakeStream:
        self.streams.append(FakeStream(f"side {len(self.streams)}"))
        return self.streams[-1]

    def Event(self) -> FakeEvent:
        assert self._current is not self.main, "the copy must run in the side stream"
        self.events.append(FakeEvent())
        return self.events[-1]

    def current_stream(self, device: torch.device) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        previous_stream, self._current = self._current, stream
        yield
        self._current = previous_stream


def test_submitted_work_runs_immediately() -> None:
    result = CudaQueue(cuda=FakeCuda()).submit(lambda: torch.arange(3))
    assert isinstance(result, LaunchedWork)
    assert result.value.tolist() == [0, 1, 2]


def test_a_copy_waits_for_earlier_work_only() -> None:
    cuda: Any = FakeCuda()
    queue = CudaQueue(cuda=cuda)
    for step in (1, 2):
        cuda.main.length += 10  # the work of the step
        tokens = torch.tensor([step, step])
        copy = queue.fetch(queue.submit(lambda tokens=tokens: tokens))
        cuda.main.length += 100  # the work of the next step
        (side_stream,) = cuda.streams
        assert side_stream.waits_for == {"main": 110 * step - 100}
        event = cuda.events[-1]
        assert event.stream is side_stream
        assert not event.is_synchronized
        assert copy.wait().tolist() == [step, step]
        assert event.is_synchronized
        tokens.zero_()
        assert copy.wait().tolist() == [step, step], "the value must be a copy"


def test_the_reference_back_end_has_no_cuda_queue() -> None:
    assert make_queue(ReferenceOps()) is None


def test_values_for_the_cpu_are_not_copied() -> None:
    values = np.arange(4)
    assert upload(values, torch.device("cpu")).data_ptr() == values.ctypes.data
    tensor = torch.from_numpy(values)
    assert upload(tensor, torch.device("cpu")) is tensor


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_later_work_on_a_gpu() -> None:
    device = torch.device("cuda")
    queue = CudaQueue()
    x = torch.rand(4096, 4096, device=device)
    result = queue.submit(lambda: x.sum())
    copy = queue.fetch(result)
    later_result = queue.submit(lambda: [x @ x for _ in range(200)][-1])
    done_event = torch.cuda.Event()
    done_event.record()
    value = copy.wait()
    assert not done_event.query(), "the copy waited for work that was submitted later"
    assert value.item() == result.value.item()
    assert later_result.value.shape == x.shape
