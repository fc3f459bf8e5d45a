"""`Ranks`: collectives and messages among the ranks of a model.

On CPUs, `all_reduce` adds in float32 in the order of the ranks and rounds once. All ranks therefore get
bit-equal sums. The shared-memory kernels (`penstock.kernels.cpu`) add in the same way. On GPUs, NCCL adds in
the type of the tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, Work

from penstock.distributed.region import SharedRegion
from penstock.distributed.shard import Shard
from penstock.errors import PenstockError, RankFailedError
from penstock.host.interrupts import deferred_interrupts

_INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes per element -> type


class Ranks:
    """The collectives and messages of one rank. One thread at a time may call the collectives.

    Args:
        rank: the number of this rank.
        world_size: the number of ranks.
        store: the store of torch.distributed through which the ranks find each other.
        timeout: seconds that a collective waits for the other ranks.
        device: the device of the tensors. Collectives use gloo for ``cpu`` and NCCL for ``cuda``.
        connections: connections for messages. Rank 0 has a connection to each other rank; every other rank
            has one connection, to rank 0.
        region: shared memory for the collectives of the C++ kernels; None to use torch.distributed only.
        by_expert: see `Shard`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        *,
        timeout: float,
        device: torch.device,
        connections: Sequence[Connection],
        region: SharedRegion | None = None,
        by_expert: bool = False,
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._store = store
        self._connections = tuple(connections)
        self._region = region
        self.by_expert = by_expert
        self._timeout = timeout
        self._failure: PenstockError | None = None
        self.caused_failure = False
        """Whether a step on this rank raised the error that made the collectives fail."""
        self._lock = threading.Lock()
        self.diagnose: Callable[[Exception], PenstockError] = _unknown_failure
        """Returns the error to raise for a failed collective or message.

        On rank 0, `RankProcesses` replaces this function by one that names the rank that has ended.
        """
        self._group = _make_process_group(store, rank, world_size, timeout, device)

    @property
    def shard(self) -> Shard:
        """The shard of this rank."""
        return Shard(self.rank, self.world_size, self.by_expert, self)

    @property
    def region(self) -> int:
        """Address of the shared memory in this process; 0 without shared memory."""
        return 0 if self._region is None else self._region.address

    @property
    def transport(self) -> str:
        """The transport of tensors: ``shared memory``, ``gloo`` or ``nccl``."""
        if self._region is not None:
            return "shared memory"
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers in shared memory, one uint8 tensor per rank; empty without shared memory."""
        return [] if self._region is None else self._region.buffers

    # -- Collectives --------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all ranks, in the type of ``x``."""
        if self.device.type == "cuda":
            total = x.contiguous().clone()
            self._wait(lambda: self._group.allreduce([total]))
            return total
        first_tensor, *other_tensors = self._gather(x.contiguous())
        total = first_tensor.float()
        for tensor in other_tensors:
            total += tensor
        return total.to(x.dtype)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return ``[T, sum(widths)]``: the columns ``x [T, widths[r]]`` of all ranks r, concatenated."""
        max_width = max(widths)
        padded_columns = (
            x.contiguous()
            if x.shape[1] == max_width
            else torch.nn.functional.pad(x, (0, max_width - x.shape[1]))
        )
        rank_tensors = self._gather(padded_columns)
        return torch.cat(
            [tensor[:, :width] for tensor, width in zip(rank_tensors, widths, strict=True)], dim=1
        )

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise minimum of ``values`` over all ranks."""
        rank_tensors = self._gather(torch.tensor(list(values), dtype=torch.int64, device=self.device))
        minimums: list[int] = torch.stack(rank_tensors).amin(0).tolist()
        return minimums

    def check(self) -> None:
        """Raise the error of an earlier failure, if any.

        Raises:
            PenstockError: a collective or a step failed, or the model is closed.
        """
        if self._failure is not None:
            raise self._failure
        if self._region is not None and self._region.is_aborted:
            self._fail(TimeoutError(f"a rank did not answer within {self._timeout:g} s"))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager of a block that every rank runs, such as a forward.

        An error in the block aborts the collectives in shared memory on all ranks, so that no other rank
        waits for a collective that this rank never calls. The first Ctrl-C is deferred to the end of the
        block, so that this rank calls all its collectives.

        Raises:
            PenstockError: an error occurred in the block, or on another rank.
            KeyboardInterrupt: Ctrl-C was pressed during the block.
        """
        try:
            with deferred_interrupts():
                yield
        except (RankFailedError, KeyboardInterrupt):
            raise
        except BaseException as error:
            # If a collective has failed, check() raises the error of that failure instead.
            self.check()
            self.caused_failure = True
            self._failure = RankFailedError(
                f"a step failed on rank {self.rank} of {self.world_size} ({type(error).__name__}: {error}): "
                "the model must be loaded again"
            )
            self.abort()
            raise self._failure from error

    def abort(self) -> None:
        """Make the collectives in shared memory fail on all ranks, including collectives that are waiting.

        Does nothing without shared memory. Any thread may call it.
        """
        if self._region is not None:
            self._region.abort()

    # -- Messages -----------------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Send a message from rank 0 to all other ranks.

        Raises:
            PenstockError: a rank has ended, a collective or a step failed earlier, or the model is closed.
        """
        self.check()
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError as error:
            self._fail(error)

    def receive(self) -> bytes:
        """Wait for the next message of rank 0, and return it.

        Raises:
            EOFError: rank 0 has ended or has closed the model.
        """
        (connection,) = self._connections
        return connection.recv_bytes()

    def mark(self, event: str) -> None:
        """Report an event of this rank to rank 0, which waits for it in `RankProcesses.wait_for`."""
        self._store.set(f"{event}/{self.rank}", "1")

    def close(self) -> None:
        """Close the connections and abort the process group. Later collectives and messages fail."""
        self._failure = self._failure or RankFailedError("the model is closed")
        for connection in self._connections:
            connection.close()
        self._group.abort()

    def _gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensor ``x`` of each rank. All ranks must pass tensors of the same shape and type."""
        integers = x.view(_INTEGER_TYPES[x.element_size()])
        outputs = [torch.empty_like(integers) for _ in range(self.world_size)]
        self._wait(lambda: self._group.allgather([outputs], [integers]))
        return [output.view(x.dtype) for output in outputs]

    def _wait(self, start: Callable[[], Work]) -> None:
        self.check()
        try:
            start().wait()
        except RuntimeError as error:  # torch.distributed has no narrower exception
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._failure = self._failure or self.diagnose(error)
        self.abort()
        raise self._failure from error


def _unknown_failure(error: Exception) -> PenstockError:
    return RankFailedError(f"a process of tensor parallelism has failed: {error}")


def _make_process_group(
    store: Store, rank: int, world_size: int, timeout: float, device: torch.device
) -> dist.ProcessGroup:
    """Return the process group of the ranks. It is not the default group of torch.distributed."""
    timeout_delta, dist_module = timedelta(seconds=timeout), cast(Any, dist)
    if device.type == "cuda":
        nccl: dist.ProcessGroup = dist_module.ProcessGroupNCCL(store, rank, world_size, timeout_delta)
        return nccl
    options = dist_module.ProcessGroupGloo._Options()
    options._devices = [dist_module.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout_delta
    options._threads = 1
    gloo: dist.ProcessGroup = dist_module.ProcessGroupGloo(store, rank, world_size, options)
    return gloo
