"""`InferenceSession`: the devices of this process, the kernels chosen for them, and its threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from penstock.driver import CPU, Device
from penstock.errors import ConfigError, ForkedProcessError
from penstock.host import limits

if TYPE_CHECKING:
    from penstock.kernels import Ops
    from penstock.kernels.cpu import GraphCache


class InferenceSession:
    """Where models run.

    Args:
        devices: the devices to run on; the host's processor if not given.
        num_threads: threads of the one OpenMP team of this process. If not given, as many as torch chooses
            (one a core, or ``OMP_NUM_THREADS``), but no more than a container's limit of time is worth.

    Raises:
        ForkedProcessError: this process was forked from one that had made a session.
    """

    _process: ClassVar[int | None] = None
    """The process that made the first session. A forked child inherits the number, but not the threads."""

    def __init__(
        self,
        devices: Sequence[Device] | None = None,
        *,
        num_threads: int | None = None,
    ) -> None:
        if InferenceSession._process is None:
            InferenceSession._process = os.getpid()
        self.check_process()
        self.devices = list(devices or [CPU()])
        if len(self.devices) > 1:
            raise ConfigError("devices", f"one device is supported, {len(self.devices)} were given")
        self.use_plans = True
        """False has every step run operation by operation: to compare."""
        self._plans: GraphCache | None = None
        if num_threads is None:
            num_threads = _threads_of_limit()
        if num_threads is not None:
            import torch

            torch.set_num_threads(num_threads)

    def check_process(self) -> None:
        """Check that this process may compute: the OpenMP team of a parent does not survive a fork.

        Raises:
            ForkedProcessError: it was forked after the first session was made. The next parallel loop would
                wait forever for threads that do not exist.
        """
        process = os.getpid()
        if InferenceSession._process not in (None, process):
            raise ForkedProcessError(InferenceSession._process, process)

    @property
    def kernels(self) -> str:
        """What operations run on: a back end, with the instruction set of the C++ kernels."""
        from penstock.kernels import cpu

        name = self.ops.name
        return f"{name} {cpu.isa()}" if isinstance(self.ops, cpu.CpuOps) else name

    @cached_property
    def ops(self) -> Ops:
        """The kernels that models of this session run on."""
        from penstock.kernels.reference import ReferenceOps

        if self.devices[0].is_host:
            from penstock.kernels import cpu

            compiled = cpu.load()
            if compiled is not None:
                return compiled
        return ReferenceOps()

    @property
    def plans(self) -> GraphCache | None:
        """The compiled steps of this session's models; None where operations run one by one."""
        from penstock.kernels import cpu

        ops = self.ops
        if not self.use_plans or type(ops) is not cpu.CpuOps:
            return None
        if self._plans is None or self._plans.ops is not ops:
            self._plans = cpu.GraphCache(ops)
        return self._plans

    @property
    def plan_status(self) -> str:
        """How the last step ran: ``planned``, as one call, or ``eager``, and why."""
        if self.plans is None:
            return f"eager: no plans for {self.ops.name} kernels" if self.use_plans else "eager: as asked for"
        return self.plans.status or "no step yet"

    @property
    def planned_steps(self) -> str:
        """Which steps run as one call, whatever the model."""
        plans = self.plans
        if plans is None:
            return "none"
        left = [name for name, owner in self.ops.chosen().items() if owner != self.ops.name]
        without = f" without {', '.join(left)}" if left else ""
        return f"of up to {plans.max_rows} rows{without}"


def _threads_of_limit() -> int | None:
    """How many threads a limit of processor time is worth; None leaves the choice to torch.

    More would be stopped together until the next period, in the middle of a step.
    """
    granted = limits.cores()
    if granted is None or "OMP_NUM_THREADS" in os.environ:
        return None
    import torch

    return min(torch.get_num_threads(), max(int(granted), 1))
