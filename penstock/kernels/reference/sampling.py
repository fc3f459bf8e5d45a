"""Sampling as `Ops.sample` defines it, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import SamplingInputs


def sample(
    logits: Tensor,  # [R, V]
    sampling: SamplingInputs,
    bitmask: Tensor | None = None,  # [R, ceil(V / 32)] int32
) -> Tensor:  # [R] int64
    """See `Ops.sample`."""
    scores = logits.double()
    is_valid = (scores < torch.inf).all(-1)
    if bitmask is not None:
        scores = scores.masked_fill(~_unpack_bits(bitmask, logits.shape[-1]), -torch.inf)
    largest, tokens = scores.max(-1)
    is_valid &= largest > -torch.inf
    is_sampled = is_valid & (sampling.temperature > 0) & (sampling.top_k != 1)
    rows = is_sampled.nonzero()[:, 0]
    if len(rows):
        tokens[rows] = _sample_rows(scores[rows], sampling.take(rows))
    return tokens.where(is_valid, -1)


def _sample_rows(scores: Tensor, sampling: SamplingInputs) -> Tensor:
    """Return the token of each row, by inverse transform sampling over the kept tokens in order of id."""
    vocabulary_size = scores.shape[-1]
    scores = scores / sampling.temperature.double()[:, None]
    probabilities = torch.softmax(scores, dim=-1)
    # Descending. The sort is stable: equal probabilities stay in the order of token ids, as top_k requires.
    sorted_probabilities, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary_size, device=scores.device)
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, vocabulary_size)[:, None]
    # The weights are the probabilities of the kept tokens, and 0 for removed tokens.
    weights = sorted_probabilities * (rank < top_k)
    mass_before = weights.cumsum(-1) - weights
    top_p = sampling.top_p.double()[:, None]
    # top_p keeps a token if the tokens before it have less than top_p of the mass that top_k leaves.
    weights = weights * ((mass_before < top_p * weights.sum(-1, keepdim=True)) | (top_p >= 1) | (rank == 0))
    weights = weights * (weights >= sampling.min_p.double()[:, None] * weights[:, :1])
    cumulative = torch.zeros_like(weights).scatter_(-1, ids, weights).cumsum(-1)  # back in token-id order
    total = cumulative[:, -1:]
    # If uniforms * total rounds up to the total, use the next smaller number, so that a kept token is found.
    target = torch.minimum(sampling.uniforms[:, None] * total, torch.nextafter(total, 0 * total))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _unpack_bits(bitmask: Tensor, vocabulary_size: int) -> Tensor:  # [R, V] bool
    bits = torch.arange(32, device=bitmask.device, dtype=torch.int32)
    return ((bitmask[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocabulary_size]
