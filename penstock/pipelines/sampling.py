"""From logits to tokens: one row of logits, one token, vectorised over the batch.

Randomness is a function of (seed, position) alone, position being the index that the sampled token will
have in its sequence. No generator is kept anywhere, so that a request draws the same tokens alone, in any
batch and after it was preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.kernels import Ops, SamplingInputs
from penstock.pipelines.core import SamplingParams, TextContext

_GAMMA = 0x9E3779B97F4A7C15
_WORD = 0xFFFFFFFFFFFFFFFF


def splitmix64(seed: int, position: int) -> int:
    """Output number ``position`` of the splitmix64 generator started at ``seed`` (Steele et al. 2014).

    >>> hex(splitmix64(0, 0))
    '0xe220a8397b1dcdaf'
    """
    state = np.array([seed & _WORD], dtype=np.uint64)
    return int(_splitmix64(state, np.array([position], dtype=np.uint64))[0])


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A float64 in [0, 1) for each (seed, position), from the upper 53 bits of `splitmix64`.

    Args:
        seeds: ``[R]`` uint64.
        positions: ``[R]`` integers.
    """
    bits = _splitmix64(seeds, positions.astype(np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Sampler:
    """The sampling parameters of a batch, laid out in arrays once for all steps of a call."""

    temperature: np.ndarray  # [B] float32
    top_k: np.ndarray  # [B] int64, 0 for all
    top_p: np.ndarray  # [B] float32
    min_p: np.ndarray  # [B] float32
    seeds: np.ndarray  # [B] uint64
    device: torch.device

    @classmethod
    def for_batch(cls, params: Sequence[SamplingParams], device: torch.device) -> Sampler:
        """Lays out the parameters of each context of a batch."""
        return cls(
            np.array([p.temperature for p in params], dtype=np.float32),
            np.array([max(p.top_k, 0) for p in params], dtype=np.int64),
            np.array([p.top_p for p in params], dtype=np.float32),
            np.array([p.min_p for p in params], dtype=np.float32),
            np.array([p.seed & _WORD for p in params], dtype=np.uint64),
            device,
        )

    def __call__(
        self,
        ops: Ops,
        logits: Tensor,  # [R, V]
        sequences: np.ndarray,  # [R]: which context of the batch a row belongs to
        positions: np.ndarray,  # [R]: the index that the row's token will have
        bitmask: Tensor | None = None,  # [R, ceil(V / 32)] int32
    ) -> Tensor:  # [R] int64
        """Samples one token a row."""
        inputs = SamplingInputs(
            self._rows(self.temperature, sequences),
            self._rows(self.top_k, sequences),
            self._rows(self.top_p, sequences),
            self._rows(self.min_p, sequences),
            torch.from_numpy(uniforms(self.seeds[sequences], positions)).to(self.device),
        )
        return ops.sample(logits, inputs, bitmask)

    def _rows(self, values: np.ndarray, sequences: np.ndarray) -> Tensor:
        return torch.from_numpy(values[sequences]).to(self.device)


def mask_min_tokens(
    logits: Tensor,  # [R, V]
    contexts: Sequence[TextContext],
    sequences: np.ndarray,  # [R]
    positions: np.ndarray,  # [R]
) -> Tensor:
    """Forbids the tokens that end a sequence where it is shorter than its ``min_new_tokens``."""
    masked = logits
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        context = contexts[sequence]
        if context.min_tokens == 0:
            continue
        mask = context.get_min_token_logit_mask(int(position) - context.active_idx + 1)[-1]  # [n, 2]
        tokens = mask[(mask[:, 1] >= 0) & (mask[:, 1] < logits.shape[-1]), 1]
        if len(tokens):  # a checkpoint may name ends that its head cannot reach
            masked = logits.clone() if masked is logits else masked
            masked[row, tokens.tolist()] = -torch.inf
    return masked


def apply_penalties(
    logits: Tensor,  # [R, V]
    contexts: Sequence[TextContext],
    sequences: np.ndarray,  # [R]
) -> Tensor:
    """Repetition penalty over prompt and output, then frequency and presence penalty over the output.

    Rows that use none cost nothing. A repeated token's positive logit is divided by the repetition
    penalty, a negative one multiplied (Keskar et al. 2019, arXiv:1909.05858).
    """
    penalised = logits
    for row, sequence in enumerate(sequences):
        context = contexts[sequence]
        if not context.sampling_params.needs_penalties:
            continue
        if penalised is logits:
            penalised = logits.to(torch.float32, copy=True)
        _penalise(penalised[row], context)
    return penalised


def _penalise(row: Tensor, context: TextContext) -> None:
    params = context.sampling_params
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(context.all_tokens)).to(row.device)
        scores = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if params.frequency_penalty or params.presence_penalty:
        tokens, counts = np.unique(context.generated_tokens, return_counts=True)
        cost = params.frequency_penalty * counts + params.presence_penalty
        row[torch.from_numpy(tokens).to(row.device)] -= torch.from_numpy(cost).to(row)


def _splitmix64(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Vigna's public-domain finaliser over ``seed + (position + 1) * gamma``, all modulo 2**64."""
    with np.errstate(over="ignore"):
        z = seeds + (positions + np.uint64(1)) * np.uint64(_GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = z ^ (z >> np.uint64(31))
        return mixed
