"""`LogitRows`, the rows of logits of a batch, and functions that select rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.architectures.model import ModelInputs, ModelOutputs
from penstock.pipelines.core import TextContext


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The rows of logits to sample from, grouped by context."""

    row_counts: list[int]  # [B]: number of rows of each context
    context_indices: np.ndarray  # [R]: index of the context of each row
    positions: np.ndarray  # [R]: index, in its context, of the token sampled from each row

    @classmethod
    def for_batch(cls, contexts: Sequence[TextContext], drafts: Sequence[list[int]]) -> LogitRows:
        """Return the rows of a step: for each context, one row per draft and one after the last draft."""
        next_positions = np.array([context.active_idx for context in contexts])
        counts = [len(draft) + 1 for draft in drafts]
        context_indices = np.arange(len(contexts))
        if not any(drafts):
            return cls(counts, context_indices, next_positions)
        context_indices = context_indices.repeat(counts)
        first_rows = np.cumsum(counts) - counts  # [B]
        positions = (
            next_positions[context_indices] + np.arange(len(context_indices)) - first_rows[context_indices]
        )
        return cls(counts, context_indices, positions)

    def after_steps(self, num_steps: int) -> LogitRows:
        """Return the rows of the step that follows ``num_steps`` decode steps."""
        return replace(self, positions=self.positions + num_steps) if num_steps else self


def rows_as_sequences(
    inputs: ModelInputs, outputs: ModelOutputs, drafts: Sequence[list[int]], context_indices: Sequence[int]
) -> tuple[ModelInputs, ModelOutputs]:
    """Return inputs and outputs of a verification step with one sequence for each token to score.

    The first sequence of a context has the rows of its active tokens. Each further sequence has the row of
    one draft.

    Args:
        inputs: inputs of the forward; the rows of a context are contiguous, its drafts last.
        outputs: outputs of the forward.
        drafts: the verified drafts of each context.
        context_indices: the index of the context of each token to score, in ascending order.
    """
    assert outputs.logits is not None, "the model returned no logits"
    old_row_offsets, old_logit_offsets = inputs.row_offsets.tolist(), inputs.logit_offsets.tolist()
    rows: list[int] = []
    logit_rows: list[int] = []
    row_offsets, logit_offsets = [0], [0]
    draft_number = 0  # 0 for the first token of a context
    for scored_index, index in enumerate(context_indices):
        is_draft = scored_index > 0 and context_indices[scored_index - 1] == index
        draft_number = draft_number + 1 if is_draft else 0
        num_drafts = len(drafts[index])
        first_draft, first_logits = (
            old_row_offsets[index + 1] - num_drafts,
            old_logit_offsets[index + 1] - num_drafts,
        )
        if draft_number == 0:
            rows += range(old_row_offsets[index], first_draft)
            logit_rows += range(old_logit_offsets[index], first_logits)
        else:
            rows.append(first_draft + draft_number - 1)
            logit_rows.append(first_logits + draft_number - 1)
        row_offsets.append(len(rows))
        logit_offsets.append(len(logit_rows))
    device = outputs.logits.device
    offsets = torch.tensor(logit_offsets, device=device)
    scored_inputs = replace(
        inputs,
        tokens=inputs.tokens[torch.tensor(rows, device=device)],
        row_offsets=torch.tensor(row_offsets, device=device),
        logit_offsets=offsets,
    )
    logits = outputs.logits[torch.tensor(logit_rows, device=device)]
    return scored_inputs, replace(outputs, next_token_logits=None, logits=logits, logit_offsets=offsets)


def last_rows(outputs: ModelOutputs, counts: Sequence[int]) -> Tensor:  # [R, V]
    """Return the last ``counts[b]`` rows of logits of each sequence b."""
    if outputs.next_token_logits is not None and max(counts) == 1:
        return outputs.next_token_logits
    assert outputs.logits is not None, "the model returned no logits"
    if sum(counts) == outputs.logits.shape[0]:
        return outputs.logits
    assert outputs.logit_offsets is not None, "logits of several rows need logit_offsets"
    offsets = outputs.logit_offsets.cpu().numpy()
    assert (np.diff(offsets) >= counts).all(), "the model returned fewer rows of logits than requested"
    ends = offsets[1:]
    rows = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    return outputs.logits[torch.from_numpy(rows).to(outputs.logits.device)]
