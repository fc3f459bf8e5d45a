"""Tensor parallelism: the operations `CollectiveOps`, and the interface `Collectives` that they call.

`penstock.distributed` implements `Collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.operations import Arguments, CFunction, UnrecordableStepError, operation


class Collectives(Protocol):
    """Combines tensors of all ranks. All ranks must call the same methods in the same order.

    `all_reduce` and `all_gather` raise a `penstock.errors.PenstockError` if a rank has ended, a step has
    failed on a rank, or the time limit is exceeded. It is the error that the rank has reported, or a
    `penstock.errors.RankFailedError`. After this error, later calls fail at once.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def region(self) -> int:
        """Address of the memory that all ranks share (`csrc/collectives.inl`); 0 without shared memory."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors ``x`` of all ranks, in the type of ``x``.

        CPU ranks add in float32, in the order of the ranks. NCCL adds in the type of ``x``.
        """
        ...

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return ``[T, sum(widths)]``: the rows ``x [T, widths[r]]`` of all ranks r side by side."""
        ...

    def check(self) -> None:
        """Raise the error of an earlier failure, if any.

        Raises:
            PenstockError: a collective or a step has failed, or the model is closed.
        """
        ...


def _require_shared_memory(arguments: Arguments) -> Arguments:
    """Return the arguments unchanged.

    Raises:
        UnrecordableStepError: the ranks share no memory. A recorded step cannot call torch.distributed.
    """
    if not arguments["ranks"].region:
        raise UnrecordableStepError("ranks without shared memory")
    return arguments


class CollectiveOps:
    """The operations of tensor parallelism: `all_reduce`, `all_gather`, and embedding of split tables."""

    name = "reference"  # the back end that `Ops.implementations` returns for methods defined here

    @operation(
        simplify=_require_shared_memory,
        functions={"all_reduce": CFunction("q P q P 2q P q", can_be_long=True)},
    )
    def all_reduce(self, x: Tensor, ranks: Collectives) -> Tensor:
        """Return the sum of ``x [T, E]`` of all ranks; see `Collectives.all_reduce`."""
        return ranks.all_reduce(x)

    @operation(
        simplify=_require_shared_memory,
        functions={"all_gather": CFunction("q P q P q 2P q", can_be_long=True)},
    )
    def all_gather(self, x: Tensor, ranks: Collectives, widths: tuple[int, ...]) -> Tensor:
        """Return ``[T, sum(widths)]``: the rows ``x [T, widths[r]]`` of all ranks r side by side."""
        return ranks.all_gather(x, widths)

    @operation(weights=["table"], functions={"embedding_part": CFunction("3P 5q")})
    def embedding_part(self, tokens: Tensor, table: Tensor, first_token_id: int) -> Tensor:
        """Return the embeddings ``[T, E]`` of ``tokens [T]`` from this rank's part of an embedding table.

        ``table [V', E]`` holds the rows of the tokens ``first_token_id`` to ``first_token_id + V' - 1``. The
        embeddings of other tokens are 0. The sum of the results of all ranks equals the lookup in the
        whole table.
        """
        local_ids = tokens - first_token_id
        is_own = (local_ids >= 0) & (local_ids < len(table))
        embeddings: Tensor = table[torch.where(is_own, local_ids, 0)]
        return embeddings.masked_fill(~is_own[:, None], 0)
