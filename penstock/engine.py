"""`InferenceSession`: the devices of this process, the kernels for them, and the number of threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakSet

from penstock.driver import CPU, Device
from penstock.errors import ConfigError, ForkedProcessError
from penstock.host import limits
from penstock.host.memory import MemoryReservations, PrefaultedMemory

if TYPE_CHECKING:
    from penstock.distributed import Shard
    from penstock.distributed.ranks import Ranks
    from penstock.kernels import Backend, DeviceMemory, DeviceQueue, GraphCache, Ops


class InferenceSession:
    """The devices, kernels and threads on which models run.

    Args:
        devices: the devices to run on; the CPU of the host if not given.
        num_threads: threads of the OpenMP team of this process. If not given, ``OMP_NUM_THREADS``, or one per
            core up to the CPU limit of the container; ranks share this number equally.
        kernels: name of the kernel back end; if not given, the best back end for the device.
        prefaulted: memory for the weights that models of this session pack.
        deterministic: whether results of a row must be bit-equal in every batch, for which some back ends use
            slower kernels.
        ranks: the processes that divide the models of this session; None for one process.

    Raises:
        ConfigError: more than one device is given.
        ForkedProcessError: this process was forked after a session had been created.
    """

    _first_session_pid: ClassVar[int | None] = None
    """Id of the process that created the first session. A forked child inherits this id, but not the OpenMP
    threads."""
    _sessions: ClassVar[WeakSet[InferenceSession]] = WeakSet()
    """The sessions of this process, guarded by `_sessions_lock`."""
    _sessions_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        devices: Sequence[Device] | None = None,
        *,
        num_threads: int | None = None,
        kernels: str | None = None,
        prefaulted: PrefaultedMemory | None = None,
        deterministic: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        if InferenceSession._first_session_pid is None:
            InferenceSession._first_session_pid = os.getpid()
        self.check_process()
        self.devices = list(devices or [CPU()])
        if len(self.devices) > 1:
            raise ConfigError("devices", f"one device is supported, {len(self.devices)} were given")
        self.use_graphs = True
        """Whether recurring steps run as compiled steps. False runs every step eagerly, for comparisons."""
        self.ranks = ranks
        self.prefaulted = prefaulted or PrefaultedMemory()
        self.reservations = MemoryReservations()
        """Host memory reserved for lazily packed weights of this session's models."""
        with self._sessions_lock:
            self._sessions.add(self)
        self._kernels = kernels
        self._is_deterministic = deterministic
        self._graphs: GraphCache | None = None
        self._graphs_ops: Ops | None = None
        if num_threads is None:
            num_threads = _allowed_threads() if ranks is None else default_threads_per_rank(ranks.world_size)
        if num_threads is not None:
            import torch

            torch.set_num_threads(num_threads)

    def check_process(self) -> None:
        """Check that this process was not forked from a process that had created a session.

        Raises:
            ForkedProcessError: the process was forked after the first session was created. A forked process
                has no OpenMP threads, so its next parallel loop would never end.
        """
        pid = os.getpid()
        if InferenceSession._first_session_pid not in (None, pid):
            raise ForkedProcessError(InferenceSession._first_session_pid, pid)

    @classmethod
    def free_memory_of(cls, devices: Sequence[Device]) -> int:
        """Return the free bytes of devices, minus host memory that sessions of this process have reserved."""
        with cls._sessions_lock:
            reserved_bytes = sum(session.reservations.num_bytes for session in cls._sessions)
        return sum(
            max(device.stats["free_memory"] - (reserved_bytes if device.is_host else 0), 0)
            for device in devices
        )

    @property
    def shard(self) -> Shard:
        """The part of a divided model that this process computes; the whole model if there are no ranks."""
        from penstock.distributed import Shard

        return Shard() if self.ranks is None else self.ranks.shard

    @property
    def kernels(self) -> str:
        """The name of the back end that computes operations, with its instruction set if it has several."""
        return self.ops.description

    @cached_property
    def _backend_and_ops(self) -> tuple[Backend, Ops]:
        from penstock.kernels.backend import BACKENDS

        backend, ops = BACKENDS.open(self.devices[0].label, self._kernels)
        ops.pack_into(self.prefaulted)
        if self._is_deterministic:
            ops.require_determinism()
        return backend, ops

    @property
    def backend(self) -> Backend:
        """The back end of this session.

        Raises:
            ConfigError: the requested back end does not exist or cannot run on this machine.
        """
        return self._backend_and_ops[0]

    @cached_property
    def ops(self) -> Ops:
        """The operations of the back end; the models of this session call them."""
        return self._backend_and_ops[1]

    @property
    def graphs(self) -> GraphCache | None:
        """The compiled steps of this session's models; None if operations run eagerly."""
        from penstock.kernels.graph import GraphCache

        if not self.use_graphs:
            return None
        if self._graphs_ops is not self.ops:
            compiler = self.backend.graphs(self.ops)
            self._graphs = GraphCache(compiler) if compiler is not None else None
            self._graphs_ops = self.ops
        return self._graphs

    @cached_property
    def queue(self) -> DeviceQueue | None:
        """The queue of the device; None if the back end is synchronous."""
        return self.backend.queue(self.ops)

    @cached_property
    def memory(self) -> DeviceMemory | None:
        """The counter of the device's memory; None if the device uses the memory of the host."""
        return self.backend.memory(self.ops, self.devices[0].torch_device)

    @property
    def graph_status(self) -> str:
        """How the last step ran: ``compiled`` (as one call), ``eager`` and the reason, or ``no step yet``."""
        graphs = self.graphs
        if graphs is None:
            if not self.use_graphs:
                return "eager: compiled steps are disabled"
            return f"eager: the {self.ops.name} kernels cannot compile steps"
        return graphs.status or "no step yet"

    @property
    def compiled_steps(self) -> str:
        """Text that describes which steps of a model can be compiled.

        ``of up to 512 rows without sample`` means that steps of more rows, and steps with the operation
        ``sample``, run eagerly. ``none`` means that all steps run eagerly.
        """
        graphs = self.graphs
        if graphs is None:
            return "none"
        eager_features = [
            name for name, owner in self.ops.implementations().items() if owner != self.ops.name
        ]
        exceptions = f" without {', '.join(eager_features)}" if eager_features else ""
        return f"of up to {graphs.max_rows} rows{exceptions}"


def default_threads_per_rank(world_size: int) -> int:
    """Return the number of threads of each rank if ``world_size`` ranks share the cores equally."""
    import torch

    return max((_allowed_threads() or torch.get_num_threads()) // world_size, 1)


def _allowed_threads() -> int | None:
    """Return the number of threads that a CPU limit allows; None leaves the choice to torch.

    With more threads, the control group would use up its CPU quota early. The system would then suspend all
    threads until the next quota period.
    """
    allowed_cores = limits.cores()
    if allowed_cores is None or "OMP_NUM_THREADS" in os.environ:
        return None
    import torch

    return min(torch.get_num_threads(), max(int(allowed_cores), 1))
