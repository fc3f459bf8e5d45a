"""`EncoderOps`: the operations of encoders, which process whole sequences without a KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from penstock.kernels.inputs import SequenceBlocks
from penstock.kernels.operations import Arguments, CFunction, UnrecordableStepError, operation


def _refuse_bias(arguments: Arguments) -> Arguments:
    """Return the arguments unchanged.

    Raises:
        UnrecordableStepError: there is a bias. Back ends may pad it, which cannot be recorded.
    """
    if arguments["bias"] is not None:
        raise UnrecordableStepError("a bias of encoder attention")
    return arguments


class EncoderOps(ABC):
    """Attention within whole sequences, and the mean of the rows of each sequence."""

    def sequence_blocks(self, row_offsets: Tensor) -> SequenceBlocks | None:
        """Return the blocks of `encoder_attention` for ``row_offsets [B + 1]``. All layers share them.

        Returns None if `encoder_attention` of the back end reads keys and values in place.
        """
        return None

    @operation(
        weights=["blocks"],
        simplify=_refuse_bias,
        functions={"short_attention": CFunction("q 6P 11q d", can_be_long=True)},
    )
    @abstractmethod
    def encoder_attention(
        self,
        q: Tensor,  # [T, H, D]
        k: Tensor,  # [T, K, D]
        v: Tensor,  # [T, K, D]
        row_offsets: Tensor,  # [B + 1] int32
        *,
        scale: float,
        window: int | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,  # [H, 2P - 1] float32
        blocks: SequenceBlocks | None = None,
    ) -> Tensor:  # [T, H, D]
        """Return the attention within each sequence of a ragged batch, without a KV cache.

        Query head h reads kv head ``h // (H / K)``. Query i sees key j of its sequence if
        ``abs(i - j) <= window`` or ``window`` is None. With ``is_causal``, query i sees only keys with ``j <=
        i``. If there is a bias, ``bias[h, j - i + P - 1]`` is added to the scaled score. P must be at least
        the length of the longest sequence. The softmax is computed in float32.

        ``blocks`` is the result of `sequence_blocks`. If it is None, a back end that needs the blocks
        computes them. A recorded step reuses the blocks, because it replays only batches with the same
        sequence lengths.
        """

    @operation(functions={"sequence_means": CFunction("q 3P 3q")})
    @abstractmethod
    def sequence_means(
        self,
        x: Tensor,  # [T, E]
        row_offsets: Tensor,  # [B + 1] int32
    ) -> Tensor:  # [B, E] float32
        """Return the mean of the rows of each sequence of a ragged batch, computed in float32."""
