"""The rows of logits of a batch: the context of each row, and the rows with log probabilities."""

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

    counts: list[int]  # [B]: rows of each context
    sequences: np.ndarray  # [R]: context of each row
    positions: np.ndarray  # [R]: index of the token sampled from each row

    @classmethod
    def of(cls, contexts: Sequence[TextContext], drafts: Sequence[list[int]]) -> LogitRows:
        ends = np.array([context.active_idx for context in contexts])
        counts = [len(draft) + 1 for draft in drafts]
        sequences = np.arange(len(contexts))
        if not any(drafts):
            return cls(counts, sequences, ends)
        sequences = sequences.repeat(counts)
        firsts = np.cumsum(counts) - counts  # [B]
        return cls(counts, sequences, ends[sequences] + np.arange(len(sequences)) - firsts[sequences])

    def after(self, step: int) -> LogitRows:
        return replace(self, positions=self.positions + step) if step else self


def rows_as_sequences(
    inputs: ModelInputs, outputs: ModelOutputs, drafts: Sequence[list[int]], owners: Sequence[int]
) -> tuple[ModelInputs, ModelOutputs]:
    """Return the rows with log probabilities as a batch: one sequence for each reported token.

    The first sequence of a context has its active rows. Each further sequence has the row of one draft.

    Args:
        inputs: inputs of the forward; the rows of a context are contiguous, its drafts last.
        outputs: outputs of the forward.
        drafts: the verified drafts.
        owners: the index of the context of each reported token.
    """
    assert outputs.logits is not None, "the model returned no logits"
    row_ends, logit_ends = inputs.row_offsets.tolist(), inputs.logit_offsets.tolist()
    rows: list[int] = []
    logit_rows: list[int] = []
    row_offsets, logit_offsets = [0], [0]
    position = 0
    for number, owner in enumerate(owners):
        position = position + 1 if number and owners[number - 1] == owner else 0
        width = len(drafts[owner])
        first_draft, first_logits = row_ends[owner + 1] - width, logit_ends[owner + 1] - width
        if position == 0:
            rows += range(row_ends[owner], first_draft)
            logit_rows += range(logit_ends[owner], first_logits)
        else:
            rows.append(first_draft + position - 1)
            logit_rows.append(first_logits + position - 1)
        row_offsets.append(len(rows))
        logit_offsets.append(len(logit_rows))
    device = outputs.logits.device
    offsets = torch.tensor(logit_offsets, device=device)
    chosen = replace(
        inputs,
        tokens=inputs.tokens[torch.tensor(rows, device=device)],
        row_offsets=torch.tensor(row_offsets, device=device),
        logit_offsets=offsets,
    )
    logits = outputs.logits[torch.tensor(logit_rows, device=device)]
    return chosen, replace(outputs, next_token_logits=None, logits=logits, logit_offsets=offsets)


def last_rows(outputs: ModelOutputs, counts: Sequence[int]) -> Tensor:  # [R, V]
    """Return the last ``counts [B]`` rows of logits of each sequence."""
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
