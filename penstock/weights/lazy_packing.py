"""`LazyPacking`: decides when the lazily packed weights of a model are packed, and reserves their memory.

A load leaves mapped weights unpacked (`penstock.kernels.LazyWeight`), and the first step multiplies by their
rows. All of them are packed before the second step, or earlier by an idle worker, one weight at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from penstock.host.heartbeat import beat
from penstock.host.memory import MemoryReservation, MemoryReservations
from penstock.kernels import LazyWeight, PackedLinear

MIN_LAZY_BYTES = 64 << 20
"""If the lazily packed weights have fewer bytes in total, the load packs them at once; this is quick."""


class LazyPacking:
    """The lazily packed weights of a model, in the order of the load.

    Args:
        layers: all linear layers of the model.
        reservations: reserves the memory that each weight will need, until the weight is packed.
    """

    def __init__(self, layers: Iterable[PackedLinear], reservations: MemoryReservations) -> None:
        weights = (layer.tensors for layer in layers)
        pending = [weight for weight in weights if isinstance(weight, LazyWeight) and weight.parts]
        self._pending: deque[tuple[LazyWeight, MemoryReservation]] = deque(
            (one, reservations.reserve(one.num_bytes)) for one in pending
        )
        self._has_run = False
        if sum(one.num_bytes for one in pending) < MIN_LAZY_BYTES:
            self.pack_all()

    @property
    def num_pending(self) -> int:
        """Number of weights that are not packed yet."""
        return sum(bool(weight.parts) for weight, _ in self._pending)

    def begin_step(self) -> None:
        """Pack the remaining weights before the second step. The first step runs without packing."""
        if self._has_run:
            self.pack_all()
        self._has_run = True

    def pack_next(self) -> bool:
        """Pack one weight if any remains, and return whether others remain."""
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
