"""Weights that are packed when they have been used, not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from penstock.host.heartbeat import beat
from penstock.host.memory import MemoryReservation


class LazyWeight(Mapping[str, Tensor]):
    """The tensors of a weight that has yet to be packed, which the first look at them does.

    Until then a back end may multiply by the floats of the parts, slower; where they are packed as floats, to
    the same bits. A load that puts off packing is over at once, and the first step does not wait either: a
    weight takes memory a second time when it is packed, which a host may need seconds to find.

    Args:
        parts: the weight, parts of ``[out, in]`` one behind the other, in memory that stays: a mapped file's.
        num_bytes: what the tensors are going to take.
        pack: makes them, given the inputs' importance or None.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        num_bytes: int,
        pack: Callable[[Tensor | None], Mapping[str, Tensor]],
    ) -> None:
        self._parts: Sequence[Tensor] = parts
        self._pack = pack
        self._tensors: Mapping[str, Tensor] | None = None
        self.num_bytes = num_bytes
        self._reservation = MemoryReservation(num_bytes)
        self.release: Callable[[], None] = lambda: None
        """Called when the parts are no longer needed."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """The weight as it is before it is packed; nothing from then on."""
        return self._parts

    def pack(self, importance: Tensor | None = None) -> Mapping[str, Tensor]:
        """The tensors, made now if they are not there; ``importance [in]`` as of `LinearEncoding.pack`."""
        if self._tensors is None:
            self._tensors = self._pack(importance)
            beat()
            self._reservation.keep()
            self._parts = ()
            self._pack = lambda _: {}
            self.release()
        return self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.pack()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.pack())

    def __len__(self) -> int:
        return len(self.pack())
