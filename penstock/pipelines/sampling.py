"""Sampling: one token from each row of logits, vectorized over the batch.

A random number is a function of the seed and of the index that the token will have in its sequence. Therefore
a request uses the same random numbers in any batch and after preemption.
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

_MAX_PENALIZED_LOGIT = 1e15
"""Maximum absolute value of logits after penalties."""
_SUPPRESSED_LOGIT = -1e20
"""The logit of an end token before ``min_new_tokens`` tokens, below the logits of other allowed tokens."""
_FORBIDDEN_LOGIT = -1e30
"""The logit of a forbidden token.

It is finite, so that the softmax is never NaN: if a grammar allows only forbidden tokens, one of them is
sampled. It remains finite in float32 after the division by a temperature of 1e-8.
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
            has_top_k_or_top_p=any(not _is_greedy(p) and (p.top_k > 0 or p.top_p < 1) for p in params),
        )
        is_greedy = all(map(_is_greedy, params))
        return cls(list(params), inputs, as_uint64([p.seed for p in params]), is_greedy)

    def __call__(
        self,
        ops: Ops,
        logits: Tensor,  # [R, V]
        context_indices: np.ndarray | None,  # [R]: context of each row
        positions: np.ndarray,  # [R]: index of each row's token in its sequence
        bitmask: Tensor | None = None,  # [R, ceil(V / 32)] int32
    ) -> Tensor:  # [R] int64; -1 for a row with NaN or inf, or without a finite allowed logit
        """Sample one token per row. If ``context_indices`` is None, each context has one row."""
        inputs, seeds = self.inputs, self.seeds
        if context_indices is not None:
            inputs, seeds = inputs.take(upload(context_indices, logits.device)), seeds[context_indices]
        if not self.is_greedy:
            random_numbers = upload(uniforms(seeds, positions), logits.device)
            inputs = replace(inputs, uniforms=random_numbers)
        return ops.sample(logits, inputs, bitmask)

    def uniforms(self, positions: np.ndarray) -> Tensor:
        """Return the random numbers ``[n, B]`` of tokens at ``positions [n, B]``; all 0 if greedy."""
        if self.is_greedy:
            return torch.zeros(positions.shape, dtype=torch.float64)
        random_numbers = uniforms(np.tile(self.seeds, len(positions)), positions.ravel())
        return torch.from_numpy(random_numbers).view(positions.shape)


def _is_greedy(params: SamplingParams) -> bool:
    """Return whether the token with the largest logit is taken."""
    return params.temperature == 0 or params.top_k == 1


def adjust_logits(
    logits: Tensor,  # [R, V]
    contexts: Sequence[TextContext],
    context_indices: np.ndarray,  # [R]: context of each row
    positions: np.ndarray,  # [R]: index of each row's token in its sequence
    drafts: Sequence[Sequence[int]] | None = None,
) -> Tensor:  # [R, V], float32 if changed
    """Return the logits with biases, penalties and token rules applied, before temperature and truncation.

    ``logits`` is not modified. If no row needs a change, ``logits`` itself is returned. See
    `LogitEdits.for_batch` for the order of the changes.

    Args:
        logits: the logits of the model.
        contexts: the batch.
        context_indices: the context of each row.
        positions: index of each row's token in its sequence.
        drafts: drafted tokens of each context. In the row of a draft, earlier drafts count as generated.

    Raises:
        InputError: a token rule contains an id outside the vocabulary (`check_logit_rules`).
    """
    edits = LogitEdits.for_batch(
        contexts, context_indices, positions, drafts, logits.shape[-1], logits.device
    )
    return logits if edits is None else edits.apply(logits)


def check_logit_rules(context: TextContext, vocab_size: int) -> None:
    """Check that the token ids in a context's token rules are below the vocabulary size.

    Raises:
        InputError: an id in ``logit_bias``, ``allowed_token_ids``, ``banned_token_ids`` or
            ``banned_sequences`` is too large.
    """
    if not context.sampling_params.has_logit_rules:
        return
    rules = context.logit_rules
    if rules is not None and rules.largest_id >= vocab_size:
        raise InputError(
            "logit_bias, allowed_token_ids, banned_token_ids or banned_sequences has "
            f"{rules.largest_id}: ids are integers from 0 to {vocab_size - 1}"
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of logits that is changed: its index, its context, and the index of the context in the batch."""

    index: int
    context: TextContext
    context_index: int


def _adjusted_rows(contexts: Sequence[TextContext], context_indices: np.ndarray) -> list[_Row]:
    needs_changes = [context.sampling_params.changes_logits for context in contexts]
    if not any(needs_changes):
        return []
    return [_Row(i, contexts[s], s) for i, s in enumerate(context_indices.tolist()) if needs_changes[s]]


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes of the logits of a batch. All tensors are on the device.

    A cell is one logit: a token id in a row. Cells are given as indices of the flattened logits ``[R * V]``.
    """

    vocab_size: int
    device: torch.device
    edits: list[Callable[[Tensor], None]] = field(default_factory=list)
    """Functions that change logits ``[R, V]`` in place."""

    @classmethod
    def for_batch(
        cls,
        contexts: Sequence[TextContext],
        context_indices: np.ndarray,  # [R]
        positions: np.ndarray,  # [R]
        drafts: Sequence[Sequence[int]] | None,
        vocab_size: int,
        device: torch.device,
    ) -> LogitEdits | None:
        """Return the changes that the sampling parameters of a batch require; None if no logits change.

        The order is the same as in transformers: logit bias; repetition, frequency and presence penalty;
        min_new_tokens; allowed and banned tokens; banned sequences. Later rules take precedence, but banned
        sequences do not forbid the last allowed tokens. The grammar's bitmask is applied last, in
        `Ops.sample`, so the sampled token is always one that the grammar allows. If all tokens of a row are
        suppressed by min_new_tokens or forbidden, suppressed tokens have the larger logit.

        Args:
            contexts: the batch.
            context_indices: the context of each row.
            positions: index of each row's token in its sequence.
            drafts: drafted tokens of each context.
            vocab_size: number of logits V.
            device: the device of the logits.

        Raises:
            InputError: a token rule contains an id outside the vocabulary (`check_logit_rules`).
        """
        rows = _adjusted_rows(contexts, context_indices)
        if not rows:
            return None
        for context in {row.context.request_id: row.context for row in rows}.values():
            check_logit_rules(context, vocab_size)
        edits = cls(vocab_size, device)
        _add_bias(edits, rows)
        _penalize(edits, rows, positions, drafts)
        _suppress_end_tokens(edits, rows, positions)
        _forbid_tokens(edits, rows)
        _forbid_sequences(edits, rows, positions, drafts)
        return edits

    def apply(self, logits: Tensor) -> Tensor:  # [R, V] -> [R, V] float32
        """Return a changed copy of the logits. A row whose largest logit is not finite becomes NaN."""
        changed_logits = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).copy_(logits)
        for edit in self.edits:
            edit(changed_logits)
        return changed_logits.masked_fill_(~logits.amax(-1, keepdim=True).isfinite(), torch.nan)

    def flat_indices(self, rows: Sequence[_Row], ids: Sequence[np.ndarray]) -> Tensor:  # [n]
        """Return the cells of the given token ids of each row, concatenated."""
        cells = [token_ids + row.index * self.vocab_size for row, token_ids in zip(rows, ids, strict=True)]
        return self.tensor(np.concatenate(cells))

    def tensor(self, values: np.ndarray) -> Tensor:
        """Return an array as a tensor on the device."""
        return upload(values, self.device)

    def map_logits(self, cells: Tensor, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the logits of cells ``[n]``."""

        def edit(logits: Tensor) -> None:
            flat_logits = logits.view(-1)
            flat_logits[cells] = function(flat_logits[cells])

        self.edits.append(edit)

    def set_logits(self, cells: Tensor, value: float) -> None:
        """Set the logits of cells ``[n]``."""

        def edit(logits: Tensor) -> None:
            logits.view(-1)[cells] = value

        self.edits.append(edit)

    def keep_only(self, rows: Sequence[_Row], cells: Tensor) -> None:
        """Forbid all tokens of the rows except those of cells ``[n]``, whose logits become at least -1e20."""
        indices = self.tensor(np.array([row.index for row in rows]))

        def edit(logits: Tensor) -> None:
            flat_logits = logits.view(-1)
            kept_logits = flat_logits[cells].clamp(min=_SUPPRESSED_LOGIT)
            logits[indices] = _FORBIDDEN_LOGIT
            flat_logits[cells] = kept_logits

        self.edits.append(edit)


def _add_bias(edits: LogitEdits, rows: Sequence[_Row]) -> None:
    biased_rows = [(row, rules) for row in rows if (rules := row.context.logit_rules) and len(rules.bias_ids)]
    if biased_rows:
        cells = edits.flat_indices(
            [row for row, _ in biased_rows], [rules.bias_ids for _, rules in biased_rows]
        )
        bias = edits.tensor(np.concatenate([rules.bias for _, rules in biased_rows]))
        edits.map_logits(cells, lambda logits: logits + bias)


def _penalize(
    edits: LogitEdits, rows: Sequence[_Row], positions: np.ndarray, drafts: Sequence[Sequence[int]] | None
) -> None:
    """Apply the repetition penalty to tokens of prompt and output, and the other penalties to output tokens.

    The repetition penalty divides positive logits and multiplies negative logits (Keskar et al. 2019,
    arXiv:1909.05858).
    """
    penalized_rows = [row for row in rows if row.context.sampling_params.needs_penalties]
    if not penalized_rows:
        return
    ids, counts, factors = [], [], []
    for row in penalized_rows:
        context, params = row.context, row.context.sampling_params
        num_drafts = max(int(positions[row.index]) - context.active_idx, 0)  # drafts before this row's token
        row_drafts = drafts[row.context_index][:num_drafts] if drafts else ()
        tokens, token_counts = context.token_counts.with_drafts(row_drafts)
        if len(tokens) and tokens.max() >= edits.vocab_size:  # ids that the head does not output
            tokens, token_counts = tokens[tokens < edits.vocab_size], token_counts[tokens < edits.vocab_size]
        ids.append(tokens)
        counts.append(token_counts)
        factors.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
    cells = edits.flat_indices(penalized_rows, ids)
    row_factors = np.repeat(np.array(factors), [len(tokens) for tokens in ids], axis=0)  # [n, 3] float64
    # A request may contain a repetition penalty of 1e300, which float32 cannot represent.
    repetition = edits.tensor(row_factors[:, 0].clip(1e-30, 1e30).astype(np.float32))
    all_counts = np.concatenate(counts)
    penalties = row_factors[:, 1] * all_counts + row_factors[:, 2] * (all_counts > 0)
    subtracted = edits.tensor(penalties.astype(np.float32))

    def penalized_logits(logits: Tensor) -> Tensor:
        logits = torch.where(logits > 0, logits / repetition, logits * repetition) - subtracted
        return logits.clamp(-_MAX_PENALIZED_LOGIT, _MAX_PENALIZED_LOGIT)

    edits.map_logits(cells, penalized_logits)


def _suppress_end_tokens(edits: LogitEdits, rows: Sequence[_Row], positions: np.ndarray) -> None:
    """Suppress the tokens that end a sequence while it has fewer than ``min_new_tokens``."""
    short_rows, ids = [], []
    for row in rows:
        context = row.context
        if context.min_tokens == 0:
            continue
        num_steps = int(positions[row.index]) - context.active_idx + 1
        end_ids = context.get_min_token_logit_mask(num_steps)[-1][:, 1].astype(np.int64)  # [n]
        short_rows.append(row)
        # A checkpoint may configure end tokens that its head does not output.
        ids.append(end_ids[(end_ids >= 0) & (end_ids < edits.vocab_size)])
    if short_rows:
        edits.set_logits(edits.flat_indices(short_rows, ids), _SUPPRESSED_LOGIT)


def _forbid_tokens(edits: LogitEdits, rows: Sequence[_Row]) -> None:
    """Forbid the banned tokens of each row, and all tokens that are not among its allowed tokens."""
    row_rules = [(row, rules) for row in rows if (rules := row.context.logit_rules)]
    allowed = [(row, rules.allowed) for row, rules in row_rules if rules.allowed is not None]
    if allowed:
        allowed_rows = [row for row, _ in allowed]
        edits.keep_only(allowed_rows, edits.flat_indices(allowed_rows, [ids for _, ids in allowed]))
    banned = [(row, rules.banned) for row, rules in row_rules if len(rules.banned)]
    if banned:
        edits.set_logits(
            edits.flat_indices([row for row, _ in banned], [ids for _, ids in banned]), _FORBIDDEN_LOGIT
        )


def _forbid_sequences(
    edits: LogitEdits, rows: Sequence[_Row], positions: np.ndarray, drafts: Sequence[Sequence[int]] | None
) -> None:
    """Forbid the tokens that would complete a banned sequence, unless no allowed token would be left."""
    completions: list[tuple[_Row, np.ndarray]] = []
    for row in rows:
        rules = row.context.logit_rules
        if rules is None or not rules.longest_prefix:
            continue
        num_drafts = max(int(positions[row.index]) - row.context.active_idx, 0)
        tokens = row.context.generated_tokens[-rules.longest_prefix :].tolist()
        ids = rules.banned_after([*tokens, *(drafts[row.context_index][:num_drafts] if drafts else ())])
        if rules.allowed is not None and not len(np.setdiff1d(rules.allowed, ids)):
            continue  # forbidding these tokens would leave no allowed token
        if len(ids):
            completions.append((row, ids))
    if completions:
        edits.set_logits(
            edits.flat_indices([row for row, _ in completions], [ids for _, ids in completions]),
            _FORBIDDEN_LOGIT,
        )
