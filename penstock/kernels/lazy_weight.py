"""`LazyWeight`: a weight whose packing is deferred, usually until after the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor


class LazyWeight(Mapping[str, Tensor]):
    """The tensors of a packed weight by name. The first access to a tensor packs the weight.

    Until the weight is packed, a back end may multiply by the floats of the parts, which is slower. With a
    float encoding the results have the same bits. Packing allocates memory for a second copy of the weight,
    and page faults in that memory can take seconds. Deferring it therefore makes the load and the first step
    faster.

    Args:
        parts: the parts of the weight ``[out, in]`` along its outputs, in order. Their memory must stay valid
            until `release` is called, for example as a mapped file.
        num_bytes: bytes of the packed tensors.
        pack: returns the packed tensors, given the importance of the inputs or None.
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
        """Called once, after the weight has been packed and the parts are no longer needed."""

    @property
    def parts(self) -> Sequence[Tensor]:
        """The parts of the weight until it is packed; empty afterwards."""
        return self._parts

    def pack(self, importance: Tensor | None = None) -> Mapping[str, Tensor]:
        """Return the packed tensors. Pack the weight if it is not packed yet.

        Args:
            importance: ``[in]``, see `LinearEncoding.pack`. Ignored if the weight is packed already.
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
