"""Token embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import StepInputs
from penstock.kernels.collectives import Collectives


@dataclass(frozen=True, slots=True)
class Embedding:
    """``tokens [T] -> [T, E]``. Provided embeddings (images, audio) replace the rows of their tokens."""

    table: Tensor  # [V, E]; a part of its rows with tensor parallelism
    scale: float = 1.0  # applied to rows of the table; given embeddings are already scaled
    ranks: Collectives | None = None
    """The ranks that divide the table; None for a whole table."""
    first: int = 0
    """The token of the first row of the table."""

    def __call__(
        self,
        tokens: Tensor,  # [T]
        step: StepInputs,
        given: tuple[Tensor, Tensor] | None = None,  # rows [P], values [P, E]
    ) -> Tensor:
        if self.ranks is None:
            x = step.ops.embedding(tokens, self.table)
        else:
            x = step.ops.all_reduce(step.ops.embedding_part(tokens, self.table, self.first), self.ranks)
        if self.scale != 1:
            x = step.ops.scale(x, self.scale)
        return x if given is None else step.ops.put_rows(x, *given)


def adapted_rows(
    ids: Tensor,  # [T]
    table: Tensor,  # [V, E]
    name: str | None,
    step: StepInputs,
) -> Tensor:  # [T, E]
    """Return rows of a table, plus ``A[:, id] @ B.T`` of each row's adapter on the table.

    Args:
        ids: the rows.
        table: the table.
        name: its name in the checkpoint, by which adapters find it.
        step: has the adapters of the step.
    """
    x = step.ops.embedding(ids, table)
    matrices = None if step.lora is None or name is None else step.lora.matrices.get(name)
    if step.lora is None or name is None or matrices is None:
        return x
    down, up = matrices  # [n, R, V], [n, E, R]
    ranks = step.lora.ranks.get(name)
    for adapter, rows in step.lora.groups:
        rank = down.shape[1] if ranks is None else int(ranks[adapter])
        if rank:
            weights = down[adapter].mT[ids[rows], :rank]  # [P, R]
            delta = weights.float() @ up[adapter, :, :rank].mT.float()
            x[rows] = (x[rows].float() + delta).to(x.dtype)
    return x
