"""Lazily packed weights: packing is deferred until after the weight has been used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor


class LazyWeight(Mapping[str, Tensor]):
    """The tensors of a weight that is not packed yet. The first access packs it.

    Until then a back end may multiply by the floats of the parts, which is slower. With a float encoding the
    results have the same bits. Packing needs memory for a second copy of the weight, and page faults in that
    memory can take seconds. Deferring it makes the load and the first step faster.

    Args:
        parts: the weight as parts of ``[out, in]``, in order. Their memory must stay valid, for
            example as a mapped file.
        num_bytes: bytes that the packed tensors take.
        pack: packs the weight, given the importance of its inputs or None.
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
        self.release: Callable[[], None] = lambda: None
        """Called when the parts are no longer needed."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """The parts of the weight before it is packed, empty afterwards."""
        return self._parts

    def pack(self, importance: Tensor | None = None) -> Mapping[str, Tensor]:
        """Return the tensors; pack the weight if it is not packed yet.

        Args:
            importance: ``[in]``, see `LinearEncoding.pack`.
        """
        if self._tensors is None:
            self._tensors = self._pack(importance)
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
