"""From logits to tokens: one row of logits, one token, vectorised over the batch.

Position, of which with the seed alone a draw is made, is the index that the sampled token will have in its
sequence: so a request draws the same tokens alone, in any batch and after it was preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from penstock.errors import InputError
from penstock.kernels import Ops, SamplingInputs
from penstock.pipelines.core import SamplingParams, TextContext
from penstock.pipelines.core.randomness import as_words, splitmix64, uniforms

__all__ = ["Sampler", "adjust_logits", "check_logit_rules", "splitmix64", "uniforms"]

_LIMIT = 1e15
"""Penalties make no logit larger than this."""
_HELD_OFF = -1e20
"""The logit of a token that ``min_new_tokens`` holds off: below every other that may be sampled."""
_FORBIDDEN = -1e30
"""The logit of a token that must not be sampled: finite, so that a grammar that allows nothing else finds a
token all the same, and the softmax of no row is NaN. Still finite in float32 at a temperature of 1e-8."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """The sampling parameters of a batch, laid out in arrays once for all steps that have the same."""

    params: list[SamplingParams]  # [B]
    inputs: SamplingInputs  # [B]; its uniforms are those of no position
    seeds: np.ndarray  # [B] uint64
    is_greedy: bool  # no row is drawn, so no uniform is looked at

    @classmethod
    def for_batch(cls, params: Sequence[SamplingParams], device: torch.device) -> Sampler:
        """Lays out the parameters of each context of a batch."""
        inputs = SamplingInputs(
            torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int64, device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
            torch.zeros(len(params), dtype=torch.float64, device=device),
        )
        is_greedy = all(p.temperature == 0 or p.top_k == 1 for p in params)
        return cls(list(params), inputs, as_words([p.seed for p in params]), is_greedy)

    def __call__(
        self,
        ops: Ops,
        logits: Tensor,  # [R, V]
        sequences: np.ndarray | None,  # [R]: which context of the batch a row belongs to
        positions: np.ndarray,  # [R]: the index that the row's token will have
        bitmask: Tensor | None = None,  # [R, ceil(V / 32)] int32
    ) -> Tensor:  # [R] int64, -1 for a row that is no distribution
        """Samples one token a row; without ``sequences`` each context has one row, in their order."""
        inputs, seeds = self.inputs, self.seeds
        if sequences is not None:
            inputs, seeds = inputs.take(torch.from_numpy(sequences).to(logits.device)), seeds[sequences]
        if not self.is_greedy:
            draws = torch.from_numpy(uniforms(seeds, positions)).to(logits.device)
            inputs = replace(inputs, uniforms=draws)
        return ops.sample(logits, inputs, bitmask)

    def uniforms(self, positions: np.ndarray) -> Tensor:
        """The draws of the tokens that will stand at ``positions [n, B]``: ``[n, B]`` float64."""
        if self.is_greedy:
            return torch.zeros(positions.shape, dtype=torch.float64)
        draws = uniforms(np.tile(self.seeds, len(positions)), positions.ravel())
        return torch.from_numpy(draws).view(positions.shape)


def adjust_logits(
    logits: Tensor,  # [R, V]
    contexts: Sequence[TextContext],
    sequences: np.ndarray,  # [R]: which context a row belongs to
    positions: np.ndarray,  # [R]: the index that the row's token will have
    drafts: Sequence[Sequence[int]] | None = None,
) -> Tensor:  # [R, V], float32 where something has changed
    """All that sampling parameters do to logits before temperature, top-k, top-p and min-p.

    In this order, which is that of transformers' processors: logit bias; repetition penalty, then frequency
    and presence penalty; min_new_tokens; allowed and banned tokens. A grammar's bitmask comes after it, in
    `Ops.sample`. What comes later wins: where a row would be left with nothing, tokens that min_new_tokens
    holds off are sampled before forbidden ones, and a grammar gets one of those that it allows.

    The given logits stay as they are. Rows that use none of it cost nothing, and where no row does the same
    tensor comes back. A row that is no distribution (`Ops.sample`) becomes NaN: nothing makes it sound.

    Args:
        logits: the model's.
        contexts: the batch.
        sequences: the context of each row.
        positions: where each row's token will stand.
        drafts: tokens that each context is thought to go on with. A row further on than the context's own
            next token counts the drafts before it as generated.

    Raises:
        InputError: a context names a token id that the model does not have (`check_logit_rules`).
    """
    rows = _adjusted_rows(contexts, sequences)
    if not rows:
        return logits
    for context in {row.context.request_id: row.context for row in rows}.values():
        check_logit_rules(context, logits.shape[-1])
    scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).copy_(logits)
    cells = _Cells(scores)
    _add_bias(cells, rows)
    _penalise(cells, rows, positions, drafts)
    _hold_off_ends(cells, rows, positions)
    _forbid(cells, rows)
    _forbid_sequences(cells, rows, positions, drafts)
    return scores.masked_fill_(~logits.amax(-1, keepdim=True).isfinite(), torch.nan)


def check_logit_rules(context: TextContext, vocabulary: int) -> None:
    """Refuses a context that names tokens which a model with this many does not have.

    Raises:
        InputError: one of its ``logit_bias``, ``allowed_token_ids``, ``banned_token_ids`` or
            ``banned_sequences`` is too large.
    """
    if not context.sampling_params.has_logit_rules:
        return
    rules = context.logit_rules
    if rules is not None and rules.largest_id >= vocabulary:
        raise InputError(
            "logit_bias, allowed_token_ids, banned_token_ids or banned_sequences has "
            f"{rules.largest_id}: "
            f"ids are integers from 0 to {vocabulary - 1}"
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that somebody wants to change."""

    index: int
    context: TextContext
    sequence: int


def _adjusted_rows(contexts: Sequence[TextContext], sequences: np.ndarray) -> list[_Row]:
    wanted = [context.sampling_params.changes_logits for context in contexts]
    if not any(wanted):
        return []
    return [_Row(i, contexts[s], s) for i, s in enumerate(sequences.tolist()) if wanted[s]]


class _Cells:
    """Reads and writes single logits, for all rows of a batch at once."""

    def __init__(self, scores: Tensor) -> None:  # [R, V]
        self._flat = scores.view(-1)
        self.vocabulary = scores.shape[-1]

    def at(self, rows: Sequence[_Row], ids: Sequence[np.ndarray]) -> Tensor:  # [n]
        """Where the tokens of each row stand, one after the other."""
        parts = [some + row.index * self.vocabulary for row, some in zip(rows, ids, strict=True)]
        return self.tensor(np.concatenate(parts))

    def tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._flat.device)

    def get(self, cells: Tensor) -> Tensor:
        return self._flat[cells]

    def put(self, cells: Tensor, values: Tensor | float) -> None:
        self._flat[cells] = values

    def fill(self, rows: Sequence[_Row], value: float) -> None:
        indices = self.tensor(np.array([row.index for row in rows]))
        self._flat.view(-1, self.vocabulary)[indices] = value


def _add_bias(cells: _Cells, rows: Sequence[_Row]) -> None:
    biased = [(row, rules) for row in rows if (rules := row.context.logit_rules) and len(rules.bias_ids)]
    if biased:
        where = cells.at([row for row, _ in biased], [rules.bias_ids for _, rules in biased])
        bias = cells.tensor(np.concatenate([rules.bias for _, rules in biased]))
        cells.put(where, cells.get(where) + bias)


def _penalise(
    cells: _Cells, rows: Sequence[_Row], positions: np.ndarray, drafts: Sequence[Sequence[int]] | None
) -> None:
    """Repetition penalty over prompt and output, then frequency and presence penalty over the output.

    A repeated token's positive logit is divided by the repetition penalty, a negative one multiplied (Keskar
    et al. 2019, arXiv:1909.05858).
    """
    penalised = [row for row in rows if row.context.sampling_params.needs_penalties]
    if not penalised:
        return
    ids, counts, factors = [], [], []
    for row in penalised:
        context, params = row.context, row.context.sampling_params
        ahead = max(int(positions[row.index]) - context.active_idx, 0)
        tokens, times = context.token_counts.behind(drafts[row.sequence][:ahead] if drafts else ())
        if len(tokens) and tokens.max() >= cells.vocabulary:  # a prompt may have tokens that no head makes
            tokens, times = tokens[tokens < cells.vocabulary], times[tokens < cells.vocabulary]
        ids.append(tokens)
        counts.append(times)
        factors.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
    where = cells.at(penalised, ids)
    each = np.repeat(np.array(factors), [len(tokens) for tokens in ids], axis=0)  # [n, 3] float64
    # Within what float32 can divide by: penalties of 1e300 are refused nowhere.
    repetition = cells.tensor(each[:, 0].clip(1e-30, 1e30).astype(np.float32))
    times = np.concatenate(counts)
    cost = cells.tensor((each[:, 1] * times + each[:, 2] * (times > 0)).astype(np.float32))
    scores = cells.get(where)
    scores = torch.where(scores > 0, scores / repetition, scores * repetition) - cost
    cells.put(where, scores.clamp(-_LIMIT, _LIMIT))


def _hold_off_ends(cells: _Cells, rows: Sequence[_Row], positions: np.ndarray) -> None:
    """Puts the tokens that end a sequence behind all others while it has too few tokens."""
    short, ids = [], []
    for row in rows:
        context = row.context
        if context.min_tokens == 0:
            continue
        steps = int(positions[row.index]) - context.active_idx + 1
        ends = context.get_min_token_logit_mask(steps)[-1][:, 1].astype(np.int64)  # [n]
        short.append(row)
        # A checkpoint may name ends that its head cannot reach.
        ids.append(ends[(ends >= 0) & (ends < cells.vocabulary)])
    if short:
        cells.put(cells.at(short, ids), _HELD_OFF)


def _forbid(cells: _Cells, rows: Sequence[_Row]) -> None:
    ruled = [(row, rules) for row in rows if (rules := row.context.logit_rules)]
    fenced = [(row, rules.allowed) for row, rules in ruled if rules.allowed is not None]
    if fenced:
        only = [row for row, _ in fenced]
        where = cells.at(only, [allowed for _, allowed in fenced])
        kept = cells.get(where).clamp(min=_HELD_OFF)
        cells.fill(only, _FORBIDDEN)
        cells.put(where, kept)
    banned = [(row, rules.banned) for row, rules in ruled if len(rules.banned)]
    if banned:
        cells.put(cells.at([row for row, _ in banned], [ids for _, ids in banned]), _FORBIDDEN)


def _forbid_sequences(
    cells: _Cells, rows: Sequence[_Row], positions: np.ndarray, drafts: Sequence[Sequence[int]] | None
) -> None:
    """Forbid the tokens that would complete a banned sequence."""
    completing: list[tuple[_Row, np.ndarray]] = []
    for row in rows:
        rules = row.context.logit_rules
        if rules is None or not rules.longest_prefix:
            continue
        ahead = max(int(positions[row.index]) - row.context.active_idx, 0)
        tokens = row.context.generated_tokens[-rules.longest_prefix :].tolist()
        ids = rules.banned_behind([*tokens, *(drafts[row.sequence][:ahead] if drafts else ())])
        if rules.allowed is not None and not len(np.setdiff1d(rules.allowed, ids)):
            continue  # none of the allowed tokens would be left
        if len(ids):
            completing.append((row, ids))
    if completing:
        cells.put(cells.at([row for row, _ in completing], [ids for _, ids in completing]), _FORBIDDEN)
