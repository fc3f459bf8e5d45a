"""Log probabilities of sampled and input tokens, from the model's own logits in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.pipelines.core import LogProbabilities
from penstock.pipelines.model import ModelInputs, ModelOutputs


def compute_log_probabilities(
    model_inputs: ModelInputs,
    model_outputs: ModelOutputs,
    next_tokens: Tensor,  # [B]
    batch_top_n: Sequence[int],
    batch_echo: Sequence[bool],
) -> list[LogProbabilities | None]:
    """See `PipelineModel.compute_log_probabilities`.

    Without echo an entry covers one position, the sampled token's. With echo it covers every input token
    of this step but the first (whose predecessor was in the step before) and then the sampled token; this
    needs a row of logits for each, i.e. ``return_n_logits`` of at least the rows of that sequence.

    Raises:
        ValueError: echo is wanted, but the forward returned fewer rows.
    """
    assert model_outputs.logits is not None
    rows = model_inputs.row_offsets.tolist()
    offsets = model_inputs.logit_offsets.tolist()
    result: list[LogProbabilities | None] = []
    for sequence, (top_n, echo) in enumerate(zip(batch_top_n, batch_echo, strict=True)):
        if top_n == 0:
            result.append(None)
            continue
        start, stop = offsets[sequence], offsets[sequence + 1]
        targets = next_tokens[sequence : sequence + 1]
        if echo:
            inputs = model_inputs.tokens[rows[sequence] : rows[sequence + 1]]
            if stop - start < len(inputs):
                raise ValueError(
                    f"echo needs logits of all {len(inputs)} input tokens, the model returned {stop - start}"
                )
            targets = torch.cat([inputs[1:], targets])
        logits = model_outputs.logits[stop - len(targets) : stop]
        result.append(_of_rows(logits, targets, top_n))
    return result


def _of_rows(logits: Tensor, targets: Tensor, top_n: int) -> LogProbabilities:
    """The entry for ``logits [R, V]`` and the tokens ``[R]`` that followed."""
    scores = torch.log_softmax(logits.float(), dim=-1)
    chosen = scores.gather(1, targets[:, None])[:, 0].tolist()
    best = scores.topk(min(top_n, scores.shape[-1]), dim=-1)
    tops = [
        dict(zip(ids, values, strict=True)) | {token: value}
        for ids, values, token, value in zip(
            best.indices.tolist(), best.values.tolist(), targets.tolist(), chosen, strict=True
        )
    ]
    return LogProbabilities(chosen, tops)
