"""Sampling: one token from each row of logits, vectorised over the batch.

A random number is a function of the seed and of the index that the token will have in its sequence. Therefore
a request samples the same tokens in any batch and after preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from penstock.errors import InputError
from penstock.kernels import Ops, SamplingInputs, upload
from penstock.pipelines.core import SamplingParams, TextContext
from penstock.pipelines.core.randomness import as_uint64, splitmix64, uniforms

__all__ = ["Sampler", "adjust_logits", "check_logit_rules", "splitmix64", "uniforms"]

_LIMIT = 1e15
"""Upper bound of logits after penalties."""
_SUPPRESSED = -1e20
"""The logit of an end token before ``min_new_tokens`` tokens. It is below the logits of all allowed
tokens."""
_FORBIDDEN = -1e30
"""The logit of a forbidden token. It is finite: if a grammar allows only forbidden tokens, one of them is
still sampled, and the softmax is never NaN. Divided by a temperature of 1e-8, it is still finite in
float32.
"""


@dataclass(frozen=True, slots=True)
class Sampler:
    """The sampling parameters of a batch as arrays, reused by all steps with the same parameters."""

    params: list[SamplingParams]  # [B]
    inputs: SamplingInputs  # [B]; the field `uniforms` is not used
    seeds: np.ndarray  # [B] uint64
    is_greedy: bool  # whether no row needs a random number

    @classmethod
    def for_batch(cls, params: Sequence[SamplingParams], device: torch.device) -> Sampler:
        """Return the sampler of a batch with these parameters."""
        inputs = SamplingInputs(
            upload(torch.tensor([p.temperature for p in params], dtype=torch.float32), device),
            upload(torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int64), device),
            upload(torch.tensor([p.top_p for p in params], dtype=torch.float32), device),
            upload(torch.tensor([p.min_p for p in params], dtype=torch.float32), device),
            torch.zeros(len(params), dtype=torch.float64, device=device),
            is_limited=any(not _is_greedy(p) and (p.top_k > 0 or p.top_p < 1) for p in params),
        )
        is_greedy = all(map(_is_greedy, params))
        return cls(list(params), inputs, as_uint64([p.seed for p in params]), is_greedy)

    def __call__(
        self,
        ops: Ops,
        logits: Tensor,  # [R, V]
        sequences: np.ndarray | None,  # [R]: context of each row
        positions: np.ndarray,  # [R]: index of each row's token in its sequence
        bitmask: Tensor | None = None,  # [R, ceil(V / 32)] int32
    ) -> Tensor:  # [R] int64, -1 for a row without finite logits
        """Sample one token per row. Without ``sequences`` each context has one row."""
        inputs, seeds = self.inputs, self.seeds
        if sequences is not None:
            inputs, seeds = inputs.take(upload(sequences, logits.device)), seeds[sequences]
        if not self.is_greedy:
            draws = upload(uniforms(seeds, positions), logits.device)
            inputs = replace(inputs, uniforms=draws)
        return ops.sample(logits, inputs, bitmask)

    def uniforms(self, positions: np.ndarray) -> Tensor:
        """Return the random numbers of tokens at ``positions [n, B]``: ``[n, B]`` float64."""
        if self.is_greedy:
            return torch.zeros(positions.shape, dtype=torch.float64)
        draws = uniforms(np.tile(self.seeds, len(positions)), positions.ravel())
        return torch.from_numpy(draws).view(positions.shape)


def _is_greedy(params: SamplingParams) -> bool:
    """Return whether the token with the largest logit is taken."""
    return params.temperature == 0 or params.top_k == 1


def adjust_logits(
    logits: Tensor,  # [R, V]
    contexts: Sequence[TextContext],
    sequences: np.ndarray,  # [R]: context of each row
    positions: np.ndarray,  # [R]: index of each row's token in its sequence
    drafts: Sequence[Sequence[int]] | None = None,
) -> Tensor:  # [R, V], float32 if changed
    """Return the logits after the sampling parameters that apply before temperature, top-k, top-p and min-p.

    The given tensor is not modified. It is returned if no row needs a change. See `LogitEdits.of` for the
    order of the changes.

    Args:
        logits: the logits of the model.
        contexts: the batch.
        sequences: the context of each row.
        positions: index of each row's token in its sequence.
        drafts: drafted tokens of each context. The row of a draft counts the drafts before it as generated.

    Raises:
        InputError: a context names a token id that the model does not have (`check_logit_rules`).
    """
    edits = LogitEdits.of(contexts, sequences, positions, drafts, logits.shape[-1], logits.device)
    return logits if edits is None else edits.apply(logits)


def check_logit_rules(context: TextContext, vocabulary: int) -> None:
    """Check that the token ids in a context's rules are below the vocabulary size.

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
    """A row whose logits are changed."""

    index: int
    context: TextContext
    sequence: int


def _adjusted_rows(contexts: Sequence[TextContext], sequences: np.ndarray) -> list[_Row]:
    needs_changes = [context.sampling_params.changes_logits for context in contexts]
    if not any(needs_changes):
        return []
    return [_Row(i, contexts[s], s) for i, s in enumerate(sequences.tolist()) if needs_changes[s]]


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes of the logits of a batch. All operands are on the device."""

    vocabulary: int
    device: torch.device
    edits: list[Callable[[Tensor], None]] = field(default_factory=list)
    """Functions that change scores ``[R, V]`` in place."""

    @classmethod
    def of(
        cls,
        contexts: Sequence[TextContext],
        sequences: np.ndarray,  # [R]
        positions: np.ndarray,  # [R]
        drafts: Sequence[Sequence[int]] | None,
        vocabulary: int,
        device: torch.device,
    ) -> LogitEdits | None:
        """Return the changes that the sampling parameters of a batch require; None if there are none.

        The order is the same as in transformers: logit bias; repetition penalty, frequency and presence
        penalty; min_new_tokens; allowed and banned tokens. The grammar's bitmask is applied later, in
        `Ops.sample`. Later rules take precedence. If no other token is left in a row, tokens suppressed by
        min_new_tokens are preferred to forbidden tokens. With a grammar, one of the tokens that it allows is
        always sampled.

        Args:
            contexts: the batch.
            sequences: the context of each row.
            positions: index of each row's token in its sequence.
            drafts: drafted tokens of each context.
            vocabulary: V.
            device: the device of the logits.

        Raises:
            InputError: a context names a token id that the model does not have (`check_logit_rules`).
        """
        rows = _adjusted_rows(contexts, sequences)
        if not rows:
            return None
        for context in {row.context.request_id: row.context for row in rows}.values():
            check_logit_rules(context, vocabulary)
        edits = cls(vocabulary, device)
        _add_bias(edits, rows)
        _penalise(edits, rows, positions, drafts)
        _suppress_ends(edits, rows, positions)
        _forbid(edits, rows)
        _forbid_sequences(edits, rows, positions, drafts)
        return edits

    def apply(self, logits: Tensor) -> Tensor:  # [R, V] -> [R, V] float32
        """Return the changed logits. A row with logits that are not finite becomes NaN."""
        scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).copy_(logits)
        for edit in self.edits:
            edit(scores)
        return scores.masked_fill_(~logits.amax(-1, keepdim=True).isfinite(), torch.nan)

    def flat_indices(self, rows: Sequence[_Row], ids: Sequence[np.ndarray]) -> Tensor:  # [n]
        """Return the flat indices of token ids of each row, concatenated."""
        parts = [token_ids + row.index * self.vocabulary for row, token_ids in zip(rows, ids, strict=True)]
        return self.tensor(np.concatenate(parts))

    def tensor(self, values: np.ndarray) -> Tensor:
        return upload(values, self.device)

    def map_scores(self, cells: Tensor, new: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the scores of cells ``[n]``."""

        def edit(scores: Tensor) -> None:
            flat = scores.view(-1)
            flat[cells] = new(flat[cells])

        self.edits.append(edit)

    def set_scores(self, cells: Tensor, value: float) -> None:
        """Set the scores of cells ``[n]``."""

        def edit(scores: Tensor) -> None:
            scores.view(-1)[cells] = value

        self.edits.append(edit)

    def keep_only(self, rows: Sequence[_Row], cells: Tensor) -> None:
        """Forbid all tokens of the rows except the cells ``[n]``."""
        indices = self.tensor(np.array([row.index for row in rows]))

        def edit(scores: Tensor) -> None:
            flat = scores.view(-1)
            kept_scores = flat[cells].clamp(min=_SUPPRESSED)
            scores[indices] = _FORBIDDEN
            flat[cells] = kept_scores

        self.edits.append(edit)


def _add_bias(edits: LogitEdits, rows: Sequence[_Row]) -> None:
    biased_rows = [(row, rules) for row in rows if (rules := row.context.logit_rules) and len(rules.bias_ids)]
    if biased_rows:
        cells = edits.flat_indices(
            [row for row, _ in biased_rows], [rules.bias_ids for _, rules in biased_rows]
        )
        bias = edits.tensor(np.concatenate([rules.bias for _, rules in biased_rows]))
        edits.map_scores(cells, lambda scores: scores + bias)


def _penalise(
    edits: LogitEdits, rows: Sequence[_Row], positions: np.ndarray, drafts: Sequence[Sequence[int]] | None
) -> None:
    """Apply the repetition penalty over prompt and output, and the other penalties over the output.

    The logit of a repeated token is divided by the repetition penalty if it is positive, and multiplied by it
    if it is negative (Keskar et al. 2019, arXiv:1909.05858).
    """
    penalised_rows = [row for row in rows if row.context.sampling_params.needs_penalties]
    if not penalised_rows:
        return
    ids, counts, factors = [], [], []
    for row in penalised_rows:
        context, params = row.context, row.context.sampling_params
        ahead = max(int(positions[row.index]) - context.active_idx, 0)
        tokens, times = context.token_counts.after(drafts[row.sequence][:ahead] if drafts else ())
        if len(tokens) and tokens.max() >= edits.vocabulary:  # ids that the head does not output
            tokens, times = tokens[tokens < edits.vocabulary], times[tokens < edits.vocabulary]
        ids.append(tokens)
        counts.append(times)
        factors.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
    cells = edits.flat_indices(penalised_rows, ids)
    row_factors = np.repeat(np.array(factors), [len(tokens) for tokens in ids], axis=0)  # [n, 3] float64
    # Keep penalties in the range of float32: requests may contain 1e300.
    repetition = edits.tensor(row_factors[:, 0].clip(1e-30, 1e30).astype(np.float32))
    times = np.concatenate(counts)
    cost = edits.tensor((row_factors[:, 1] * times + row_factors[:, 2] * (times > 0)).astype(np.float32))

    def penalised_scores(scores: Tensor) -> Tensor:
        scores = torch.where(scores > 0, scores / repetition, scores * repetition) - cost
        return scores.clamp(-_LIMIT, _LIMIT)

    edits.map_scores(cells, penalised_scores)


def _suppress_ends(edits: LogitEdits, rows: Sequence[_Row], positions: np.ndarray) -> None:
    """Suppress the tokens that end a sequence while it has fewer than ``min_new_tokens``."""
    short_rows, ids = [], []
    for row in rows:
        context = row.context
        if context.min_tokens == 0:
            continue
        steps = int(positions[row.index]) - context.active_idx + 1
        ends = context.get_min_token_logit_mask(steps)[-1][:, 1].astype(np.int64)  # [n]
        short_rows.append(row)
        # A checkpoint may name end tokens that its head does not output.
        ids.append(ends[(ends >= 0) & (ends < edits.vocabulary)])
    if short_rows:
        edits.set_scores(edits.flat_indices(short_rows, ids), _SUPPRESSED)


def _forbid(edits: LogitEdits, rows: Sequence[_Row]) -> None:
    rows_with_rules = [(row, rules) for row in rows if (rules := row.context.logit_rules)]
    restricted = [(row, rules.allowed) for row, rules in rows_with_rules if rules.allowed is not None]
    if restricted:
        restricted_rows = [row for row, _ in restricted]
        edits.keep_only(
            restricted_rows, edits.flat_indices(restricted_rows, [allowed for _, allowed in restricted])
        )
    banned = [(row, rules.banned) for row, rules in rows_with_rules if len(rules.banned)]
    if banned:
        edits.set_scores(
            edits.flat_indices([row for row, _ in banned], [ids for _, ids in banned]), _FORBIDDEN
        )


def _forbid_sequences(
    edits: LogitEdits, rows: Sequence[_Row], positions: np.ndarray, drafts: Sequence[Sequence[int]] | None
) -> None:
    """Forbid the tokens that would complete a banned sequence."""
    completions: list[tuple[_Row, np.ndarray]] = []
    for row in rows:
        rules = row.context.logit_rules
        if rules is None or not rules.longest_prefix:
            continue
        ahead = max(int(positions[row.index]) - row.context.active_idx, 0)
        tokens = row.context.generated_tokens[-rules.longest_prefix :].tolist()
        ids = rules.banned_after([*tokens, *(drafts[row.sequence][:ahead] if drafts else ())])
        if rules.allowed is not None and not len(np.setdiff1d(rules.allowed, ids)):
            continue  # it would forbid all allowed tokens
        if len(ids):
            completions.append((row, ids))
    if completions:
        edits.set_scores(
            edits.flat_indices([row for row, _ in completions], [ids for _, ids in completions]), _FORBIDDEN
        )
