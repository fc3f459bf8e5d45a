"""The compiled steps of a session: recorded when a shape comes back, replayed from then on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping

import torch
from torch import Tensor

from penstock.kernels.cpu.library import Neighbours
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.plan import CompiledPlan
from penstock.kernels.inputs import SamplingInputs
from penstock.kernels.ops import Ops
from penstock.kernels.recording import UnrecordableStepError, record

_PLANS, _SHAPES = 64, 1024
_COLUMNS = 128


class GraphCache:
    """Plans by what they were recorded for. All of them share one arena: one step runs at a time.

    Args:
        ops: the back end that runs them.
    """

    max_rows = 64
    """Rows up to which a step is worth a plan: beyond, its operations take so long that starting them
    does not matter."""

    def __init__(self, ops: CpuOps) -> None:
        self.ops = ops
        """The back end that runs them."""
        self._plans: OrderedDict[Hashable, CompiledPlan] = OrderedDict()  # the least used first
        self._seen: OrderedDict[Hashable, str | None] = OrderedDict()  # why there can be no plan, if known
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._neighbours = Neighbours()
        self._last: CompiledPlan | None = None
        self._reason: str | None = None

    @staticmethod
    def columns(width: int) -> int:
        """Columns that a plan has room for, where ``width`` are wanted."""
        return max(_COLUMNS, 1 << (width - 1).bit_length())

    @property
    def status(self) -> str | None:
        """How the last step ran, for people: ``planned`` or ``eager`` and why; None before the first."""
        if self._last is not None:
            return f"planned: {len(self._last)} kernels in one call"
        return None if self._reason is None else f"eager: {self._reason}"

    @property
    def last(self) -> CompiledPlan | None:
        """The plan that the last step ran as."""
        return self._last

    def run(
        self,
        key: Hashable,
        inputs: Mapping[str, Tensor],
        step: Callable[[Ops, Mapping[str, Tensor]], Iterable[Tensor]],
    ) -> tuple[Tensor, ...] | None:
        """The results of a step, or None where it is to run eagerly.

        Args:
            key: all that changes the operations of the step, the sizes of its inputs included; of those with
                two dimensions the rows, and `columns` of their columns.
            inputs: its tensors, always in the same order.
            step: runs it on the operations and inputs it is given.

        Raises:
            IndexError: a token or a position is outside its table.
        """
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            self._last = plan
            return plan.replay(list(inputs.values()))
        self._last = None
        if key not in self._seen:  # a shape that never comes back is not worth a plan
            self._seen[key] = None
            if len(self._seen) > _SHAPES:
                self._seen.popitem(last=False)
            self._reason = "a step of this shape ran once"
            return None
        if (reason := self._seen[key]) is not None:
            self._reason = reason
            return None
        return self._record(key, inputs, step)

    def run_loop(
        self,
        key: Hashable,
        inputs: Mapping[str, Tensor],
        varied: Mapping[str, Tensor],
        sampling: SamplingInputs,
        uniforms: Tensor,
        ends: Tensor,
    ) -> Tensor | None:
        """Several steps in a row in one call, see `CompiledPlan.replay_steps`; None where there is no plan
        for them yet."""
        plan = self._plans.get(key)
        if plan is None:
            return None
        self._plans.move_to_end(key)
        self._last = plan
        return plan.replay_steps(list(inputs.values()), varied, sampling, uniforms, ends)

    def skip(self, reason: str) -> None:
        """Notes that a step ran eagerly without being asked for here, and why."""
        self._last, self._reason = None, reason

    def _record(
        self,
        key: Hashable,
        inputs: Mapping[str, Tensor],
        step: Callable[[Ops, Mapping[str, Tensor]], Iterable[Tensor]],
    ) -> tuple[Tensor, ...] | None:
        results: list[Tensor] = []
        own = {name: _roomy(tensor) for name, tensor in inputs.items()}

        def run(ops: Ops) -> list[Tensor]:
            results.extend(step(ops, own))
            return results

        try:
            with torch.inference_mode():
                plan = record(self.ops, own, run)
                if plan.arena_bytes > len(self._arena):
                    self._arena = torch.empty(2 * plan.arena_bytes, dtype=torch.uint8)
                    self._plans.clear()  # they write to the old one
                self._plans[key] = CompiledPlan(plan, self.ops, own, self._arena, self._neighbours)
        except UnrecordableStepError as error:
            self._reason = self._seen[key] = str(error)
            return None  # the eager step writes to the cache once more what was written
        if len(self._plans) > _PLANS:
            self._plans.popitem(last=False)
        self._last = self._plans[key]
        return tuple(results)


def _roomy(tensor: Tensor) -> Tensor:
    """A copy; of two dimensions a view of one with room for more columns."""
    if tensor.dim() != 2:
        return tensor.clone(memory_format=torch.contiguous_format)
    rows, width = tensor.shape
    copied = torch.zeros(rows, GraphCache.columns(width), dtype=tensor.dtype)
    copied[:, :width] = tensor
    return copied
