"""`LazyPacking`: decides when the lazily packed weights of a model are packed, and reserves their memory.

Loading a model leaves mapped weights unpacked (`penstock.kernels.LazyWeight`). The first step computes with
the unpacked weights. An idle worker packs one weight at a time. All weights that are still unpacked are
packed before the second step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from penstock.host.heartbeat import beat
from penstock.host.memory import MemoryReservation, MemoryReservations
from penstock.kernels import LazyWeight, PackedLinear

MIN_LAZY_BYTES = 64 << 20
"""If the lazily packed weights of a model have fewer bytes in total, they are packed during loading, because
packing few bytes is fast.
"""


class LazyPacking:
    """The lazily packed weights of a model, in load order.

    Args:
        layers: all linear layers of the model.
        reservations: reserves the memory of each packed weight until the weight is packed.
    """

    def __init__(self, layers: Iterable[PackedLinear], reservations: MemoryReservations) -> None:
        weights = (layer.tensors for layer in layers)
        pending = [weight for weight in weights if isinstance(weight, LazyWeight) and weight.parts]
        self._pending: deque[tuple[LazyWeight, MemoryReservation]] = deque(
            (weight, reservations.reserve(weight.num_bytes)) for weight in pending
        )
        self._has_run_step = False
        if sum(weight.num_bytes for weight in pending) < MIN_LAZY_BYTES:
            self.pack_all()

    @property
    def num_pending(self) -> int:
        """Number of weights that are not packed yet."""
        return sum(bool(weight.parts) for weight, _ in self._pending)

    def begin_step(self) -> None:
        """Pack the remaining weights if this is not the first step."""
        if self._has_run_step:
            self.pack_all()
        self._has_run_step = True

    def pack_next(self) -> bool:
        """Pack the next weight, if there is one. Return whether more weights remain."""
        if self._pending:
            weight, reservation = self._pending.popleft()
            weight.pack()
            reservation.end()
            beat()
        return bool(self._pending)

    def pack_all(self) -> None:
        """Pack all remaining weights."""
        while self.pack_next():
            pass
