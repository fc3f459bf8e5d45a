"""Token embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import StepInputs
from penstock.kernels.collectives import Collectives


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token embedding: ``tokens [T] -> [T, E]``.

    Embeddings of images replace the rows of their placeholder tokens.
    """

    table: Tensor  # [V, E]; with tensor parallelism, this rank's rows
    scale: float = 1.0  # multiplies rows of the table, not `input_embeds`
    ranks: Collectives | None = None
    """The ranks among which the table is divided; None for a whole table."""
    first_token_id: int = 0
    """The token id of the first row of `table`."""

    def __call__(
        self,
        tokens: Tensor,  # [T]
        step: StepInputs,
        input_embeds: tuple[Tensor, Tensor] | None = None,  # rows [P], values [P, E]
    ) -> Tensor:
        if self.ranks is None:
            x = step.ops.embedding(tokens, self.table)
        else:
            x = step.ops.all_reduce(
                step.ops.embedding_part(tokens, self.table, self.first_token_id), self.ranks
            )
        if self.scale != 1:
            x = step.ops.scale(x, self.scale)
        return x if input_embeds is None else step.ops.put_rows(x, *input_embeds)


def adapted_rows(
    ids: Tensor,  # [T]
    table: Tensor,  # [V, E]
    name: str | None,
    step: StepInputs,
) -> Tensor:  # [T, E]
    """Return rows of a table with LoRA: ``table[id] + A[:, id] @ B.T``; each row can have its own adapter.

    Args:
        ids: the indices of the table rows.
        table: the table.
        name: the name of the table in the checkpoint and in adapters; None for a table without adapters.
        step: the inputs of the step, including its adapters.
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
