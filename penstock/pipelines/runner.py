"""The forwards of one call of a pipeline: from contexts to the tokens sampled for them.

No context changes here. Whatever is wrong with a single one is said in its `SampledTokens`; whatever raises
leaves all as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.architectures.model import ModelOutputs, PipelineModel
from penstock.engine import InferenceSession
from penstock.errors import UnsupportedFeatureError
from penstock.grammar import grammar_bitmask
from penstock.host.heartbeat import beat
from penstock.kv_cache import KVCache, KVCacheManager
from penstock.pipelines.core import LogProbabilities, SamplingParams, TextContext
from penstock.pipelines.sampling import Sampler, adjust_logits
from penstock.pipelines.speculative import accept

_MAX_FUSED_STEPS = 8
"""Steps that are run together where nobody says how many: beyond these there is little left to save."""


@dataclass(slots=True)
class SampledTokens:
    """What the forwards of a call gave one context."""

    tokens: list[int] = field(default_factory=list)
    """The drafts that were accepted and the token behind them; or one token a forward."""
    log_probabilities: list[LogProbabilities] = field(default_factory=list)
    """One entry a token, where they were asked for; the first may begin with those of the prompt."""
    fault: str | None = None
    """Why the tokens are not to be used."""


class ModelRunner:
    """Runs a model for a pipeline.

    Args:
        model: the model.
        session: its kernels.
        kv: the cache that holds the contexts' blocks.
    """

    def __init__(self, model: PipelineModel[Any], session: InferenceSession, kv: KVCache) -> None:
        self._model = model
        self._session = session
        self._kv = kv
        self._device = model.devices[0].torch_device
        self._sampler: Sampler | None = None
        self._seconds: float | None = None
        self.vocabulary: int | None = None
        """V, known once a forward has returned logits."""

    def num_steps_for(self, seconds: float) -> int:
        """How many steps of one token each take about so long together, by the last ones of that kind; at
        most `_MAX_FUSED_STEPS`. 1 before the first, and where a single one takes more than half of it."""
        if self._seconds is None:
            return 1
        return max(1, min(int(seconds / self._seconds), _MAX_FUSED_STEPS))

    def run(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], num_steps: int
    ) -> list[SampledTokens]:
        """Samples a token for each context, ``num_steps`` times; or verifies drafts, in one step.

        Raises:
            UnsupportedFeatureError: log probabilities are asked for that the model does not compute.
        """
        assert num_steps == 1 or not any(drafts), "drafts are verified in one step"
        sampler = self._sampler_of([context.sampling_params for context in contexts])
        rows = _Rows.of(contexts, drafts)
        inputs = self._initial_inputs(contexts, drafts)
        results = [SampledTokens() for _ in contexts]
        are_scored = any(context.log_probabilities for context in contexts)
        is_decoding = len(rows.positions) == len(contexts) and all(c.active_length == 1 for c in contexts)
        begin = perf_counter()
        if num_steps > 1 and is_decoding and not are_scored:
            together = self._run_fused_steps(sampler, contexts, rows, inputs, num_steps)
            if together is not None:
                for sampled in together:
                    _append_sampled(results, drafts, sampled)
                self._seconds = (perf_counter() - begin) / len(together)
                return results
        for step in range(num_steps):
            outputs = self._model.execute(inputs)
            beat()
            logits = _last_rows(outputs, rows.counts)
            self.vocabulary = logits.shape[-1]
            tokens = self._sample(sampler, contexts, drafts, rows.after(step), logits)
            _append_sampled(results, drafts, tokens.tolist())
            if are_scored:
                self._score(contexts, drafts, inputs, outputs, results)
            if step + 1 < num_steps:
                # A row that is no distribution goes on with any token: what comes of it is not used.
                inputs = self._model.prepare_next_token_inputs(tokens.clamp(min=0), inputs)
        if is_decoding:
            self._seconds = (perf_counter() - begin) / num_steps
        return results

    def _run_fused_steps(
        self,
        sampler: Sampler,
        contexts: Sequence[TextContext],
        rows: _Rows,
        inputs: Any,
        num_steps: int,
    ) -> list[list[int]] | None:
        """The tokens of each step, ``[m][B]``, where the model runs them all as one call; else None.

        Not where somebody changes the logits on their way to the sampler.
        """
        if any(context.sampling_params.changes_logits for context in contexts):
            return None
        positions = rows.positions + np.arange(num_steps)[:, None]  # [n, B]
        ends = [list(context.eos_token_ids) for context in contexts]
        most = max(1, max(map(len, ends)))
        tokens = self._model.execute_steps(
            inputs,
            sampler.inputs,
            sampler.uniforms(positions),
            torch.tensor([some + [-1] * (most - len(some)) for some in ends]),
        )
        return None if tokens is None else tokens.tolist()

    def _sampler_of(self, params: list[SamplingParams]) -> Sampler:
        """The sampler of the last call, where the batch has the same parameters."""
        if self._sampler is None or self._sampler.params != params:
            self._sampler = Sampler.for_batch(params, self._device)
        return self._sampler

    def _initial_inputs(self, contexts: Sequence[TextContext], drafts: Sequence[list[int]]) -> Any:
        are_drafted, are_echoed = any(drafts), any(_echoes(context) for context in contexts)
        counts = [context.active_length for context in contexts]
        if are_drafted:
            counts = [count + len(draft) for count, draft in zip(counts, drafts, strict=True)]
        kv = self._kv.inputs(contexts, counts=counts) if isinstance(self._kv, KVCacheManager) else None
        num_logits: Any = 1
        if are_drafted or are_echoed:
            num_logits = [
                count if _echoes(context) else len(draft) + 1
                for context, draft, count in zip(contexts, drafts, counts, strict=True)
            ]
        options: dict[str, Any] = {"drafts": drafts} if are_drafted else {}
        return self._model.prepare_initial_token_inputs([contexts], kv, num_logits, **options)

    def _sample(
        self,
        sampler: Sampler,
        contexts: Sequence[TextContext],
        drafts: Sequence[list[int]],
        rows: _Rows,
        logits: Tensor,  # [R, V]
    ) -> Tensor:  # [R] tokens
        """Samples behind each context's last row, and in place of each of its drafts."""
        logits = adjust_logits(logits, contexts, rows.sequences, rows.positions, drafts)
        bitmask = grammar_bitmask(contexts, rows.sequences, logits.shape[-1], drafts)
        if bitmask is not None:
            bitmask = bitmask.to(self._device)
        sequences = rows.sequences if any(drafts) else None
        return sampler(self._session.ops, logits, sequences, rows.positions, bitmask)

    def _score(
        self,
        contexts: Sequence[TextContext],
        drafts: Sequence[list[int]],
        inputs: Any,
        outputs: ModelOutputs,
        results: Sequence[SampledTokens],
    ) -> None:
        """Adds the log probabilities of the tokens just handed out.

        Behind a prompt chunk stands the prompt's own next token. The token in place of each draft is scored
        as if its row were a sequence of one row.
        """
        targets, top_n, echo, owners = [], [], [], []
        for index, (context, result) in enumerate(zip(contexts, results, strict=True)):
            is_chunk = context.active_idx < context.end_idx
            scored = [int(context.all_tokens[context.active_idx])] if is_chunk else result.tokens
            if any(drafts) and not context.log_probabilities:
                scored = []
            targets += scored
            owners += [index] * len(scored)
            top_n += [context.log_probabilities or 0] * len(scored)
            echo += [_echoes(context)] + [False] * (len(scored) - 1) if scored else []
        if any(drafts):
            inputs, outputs = _as_sequences(inputs, outputs, drafts, owners)
        try:
            entries = self._model.compute_log_probabilities(
                self._session, inputs, outputs, torch.tensor(targets, device=self._device), top_n, echo
            )
        except NotImplementedError as error:
            raise UnsupportedFeatureError("log probabilities", str(error)) from error
        for owner, entry in zip(owners, entries, strict=True):
            if entry is not None:
                results[owner].log_probabilities.append(entry)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of logits to sample from, those of each context together."""

    counts: list[int]  # [B]: how many a context has
    sequences: np.ndarray  # [R]: whose a row is
    positions: np.ndarray  # [R]: the index that the token sampled from it will have

    @classmethod
    def of(cls, contexts: Sequence[TextContext], drafts: Sequence[list[int]]) -> _Rows:
        ends = np.array([context.active_idx for context in contexts])
        counts = [len(draft) + 1 for draft in drafts]
        sequences = np.arange(len(contexts))
        if not any(drafts):
            return cls(counts, sequences, ends)
        sequences = sequences.repeat(counts)
        firsts = np.cumsum(counts) - counts  # [B]
        return cls(counts, sequences, ends[sequences] + np.arange(len(sequences)) - firsts[sequences])

    def after(self, step: int) -> _Rows:
        return replace(self, positions=self.positions + step) if step else self


def _echoes(context: TextContext) -> bool:
    return bool(context.log_probabilities) and context.log_probabilities_echo


def _append_sampled(
    results: Sequence[SampledTokens], drafts: Sequence[list[int]], tokens: Sequence[int]
) -> None:
    """Adds to each context's tokens those that verification yields, of the ``[R]`` sampled ones."""
    start = 0
    for result, draft in zip(results, drafts, strict=True):
        end = start + len(draft) + 1
        accepted = accept(draft, tokens[start:end]) if draft else [tokens[start]]
        if min(accepted) < 0:
            result.fault = "the model gave logits that are not finite numbers"
            accepted = [max(token, 0) for token in accepted]  # nobody uses them, but they may be scored
        result.tokens += accepted
        start = end


def _as_sequences(
    inputs: Any, outputs: ModelOutputs, drafts: Sequence[list[int]], owners: Sequence[int]
) -> tuple[Any, ModelOutputs]:
    """The rows to score as a batch of their own: a context's active rows, then each accepted draft's alone.

    Args:
        inputs: of the forward; all rows of a context stand together, its drafts last.
        outputs: of the forward.
        drafts: the drafts that it verified.
        owners: the context of each token to score; its first is scored by the active rows.
    """
    assert outputs.logits is not None, "the model returned no logits"
    row_ends, logit_ends = inputs.row_offsets.tolist(), inputs.logit_offsets.tolist()
    rows: list[int] = []
    logit_rows: list[int] = []
    row_offsets, logit_offsets = [0], [0]
    place = 0
    for number, owner in enumerate(owners):
        place = place + 1 if number and owners[number - 1] == owner else 0
        width = len(drafts[owner])
        first_draft, first_logits = row_ends[owner + 1] - width, logit_ends[owner + 1] - width
        if place == 0:
            rows += range(row_ends[owner], first_draft)
            logit_rows += range(logit_ends[owner], first_logits)
        else:
            rows.append(first_draft + place - 1)
            logit_rows.append(first_logits + place - 1)
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


def _last_rows(outputs: ModelOutputs, counts: Sequence[int]) -> Tensor:  # [R, V]
    """The last ``counts [B]`` rows of logits of each sequence."""
    if outputs.next_token_logits is not None and max(counts) == 1:
        return outputs.next_token_logits
    assert outputs.logits is not None, "the model returned no logits"
    if sum(counts) == outputs.logits.shape[0]:
        return outputs.logits
    assert outputs.logit_offsets is not None, "logits of several rows need logit_offsets"
    offsets = outputs.logit_offsets.cpu().numpy()
    assert (np.diff(offsets) >= counts).all(), "the model returned fewer rows of logits than it was asked for"
    ends = offsets[1:]
    rows = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    return outputs.logits[torch.from_numpy(rows).to(outputs.logits.device)]
