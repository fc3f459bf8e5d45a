"""Computes log probabilities of sampled and input tokens from the unmodified logits, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.pipelines.core import LogProbabilities

_MAX_LOGITS = 1 << 23
"""Maximum number of logits that are processed at once, 32 MiB in float32. At least one row is processed."""


def compute_log_probabilities(
    tokens: Tensor,  # [T]
    row_offsets: Tensor,  # [B + 1]
    logits: Tensor,  # [R, V]
    logit_offsets: Tensor,  # [B + 1]
    next_tokens: Tensor,  # [B]
    batch_top_n: Sequence[int],
    batch_echo: Sequence[bool],
) -> list[LogProbabilities | None]:
    """Return the log probabilities of a batch, None for sequences with ``top_n`` 0.

    See `PipelineModel.compute_log_probabilities`.

    Without echo, an entry has the log probability of the sampled token. With echo, it also has those of the
    input tokens of this step, except of the first input token, whose logits were computed in the previous
    step. Echo needs logits at all positions of the sequence (``return_n_logits``).

    Raises:
        ValueError: echo is requested, but ``logits`` lacks rows for some of the sequence's input tokens.
    """
    input_starts = row_offsets.tolist()
    logit_starts = logit_offsets.tolist()
    rows_by_sequence: list[_Rows | None] = []
    for sequence, (top_n, echo) in enumerate(zip(batch_top_n, batch_echo, strict=True)):
        if top_n == 0:
            rows_by_sequence.append(None)
            continue
        start, stop = logit_starts[sequence], logit_starts[sequence + 1]
        targets = next_tokens[sequence : sequence + 1]
        if echo:
            inputs = tokens[input_starts[sequence] : input_starts[sequence + 1]]
            if stop - start < len(inputs):
                raise ValueError(
                    f"echo needs logits of all {len(inputs)} input tokens, the model returned {stop - start}"
                )
            targets = torch.cat([inputs[1:], targets])
        rows_by_sequence.append(_Rows(stop - len(targets), targets, min(top_n, logits.shape[-1])))
    requested_rows = [rows for rows in rows_by_sequence if rows is not None]
    for top_n in {rows.top_n for rows in requested_rows}:
        # One call per top_n, so that k does not depend on other requests: the order of equal logits in the
        # result of topk can depend on k.
        _add_log_probabilities(logits, [rows for rows in requested_rows if rows.top_n == top_n], top_n)
    return [None if rows is None else rows.log_probabilities for rows in rows_by_sequence]


@dataclass(slots=True)
class _Rows:
    """The rows of logits of one sequence, and for each row the token whose log probability is requested."""

    start: int  # index of the first row
    targets: Tensor  # [n], the token of each row
    top_n: int
    log_probabilities: LogProbabilities = field(default_factory=lambda: LogProbabilities([], []))


def _add_log_probabilities(logits: Tensor, sequences: Sequence[_Rows], top_n: int) -> None:  # [R, V]
    """Add the log probabilities of each row to the `log_probabilities` of its sequence.

    Rows are processed in chunks, so that copies need little memory.
    """
    indices = torch.cat(
        [torch.arange(sequence.start, sequence.start + len(sequence.targets)) for sequence in sequences]
    )
    indices = indices.to(logits.device)
    targets = torch.cat([sequence.targets for sequence in sequences])
    row_results = [sequence.log_probabilities for sequence in sequences for _ in range(len(sequence.targets))]
    rows_per_chunk = max(1, _MAX_LOGITS // logits.shape[-1])
    for start in range(0, len(row_results), rows_per_chunk):
        rows = slice(start, start + rows_per_chunk)
        scores = torch.log_softmax(logits[indices[rows]].float(), dim=-1)
        target_scores = scores.gather(1, targets[rows, None])[:, 0].tolist()
        top_scores = scores.topk(top_n, dim=-1)
        for result, ids, values, token, value in zip(
            row_results[rows],
            top_scores.indices.tolist(),
            top_scores.values.tolist(),
            targets[rows].tolist(),
            target_scores,
            strict=True,
        ):
            result.token_log_probabilities.append(value)
            result.top_log_probabilities.append(dict(zip(ids, values, strict=True)) | {token: value})
