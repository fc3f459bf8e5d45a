"""Routers in plain torch, and the operations that scale and widen rows."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.routing import Routing, RoutingOps, ScoreRouting, SparseMixer


class ReferenceRouting(RoutingOps):
    """The operations of routers in plain torch, for every device."""

    name = "reference"

    def route(
        self, logits: Tensor, top_k: int, routing: Routing, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        if isinstance(routing, ScoreRouting):
            return _route_by_scores(logits, top_k, routing, bias)
        assert bias is None
        if isinstance(routing, SparseMixer):
            return _sparse_mixer(logits, top_k, routing.eps)
        topk_ids = _select_largest(logits, top_k)
        if routing == "chosen":
            return logits.gather(-1, topk_ids).softmax(-1), topk_ids
        topk_weights = logits.softmax(-1).gather(-1, topk_ids)
        if routing == "all_normed":
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        return topk_weights, topk_ids

    def scale_rows(self, x: Tensor, factors: Tensor, *, are_logits: bool = False) -> Tensor:
        wide = factors.float()
        if are_logits:
            wide = 1 / (1 + torch.exp(-wide))
        return (x.float() * wide).to(x.dtype)

    def widen(self, x: Tensor) -> Tensor:
        return x.float()


def _select_largest(scores: Tensor, top_k: int) -> Tensor:  # [T, top_k]
    """Return the ids of the largest scores; a NaN counts as -inf.

    Uses a stable sort, because the order of ties in torch.topk is undefined.
    """
    without_nan = scores.masked_fill(scores.isnan(), -torch.inf)
    return torch.sort(without_nan, dim=-1, descending=True, stable=True)[1][..., :top_k]


def _route_by_scores(
    logits: Tensor, top_k: int, routing: ScoreRouting, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    if routing.scores == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = 1 / (1 + torch.exp(-logits))
    # Without a bias and with one group, experts are ranked by logits, because different logits can round to
    # equal scores.
    ranking_scores = logits if bias is None and routing.num_groups == 1 else scores
    if bias is not None:
        ranking_scores = ranking_scores + bias
    if routing.num_groups > 1:
        ranking_scores = _mask_unselected_groups(ranking_scores, routing.num_groups, routing.num_top_groups)
    topk_ids = _select_largest(ranking_scores, top_k)
    topk_weights = scores.gather(-1, topk_ids)
    if routing.is_normed:
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True).clamp_min(routing.min_sum)
    return topk_weights * routing.scale, topk_ids


def _mask_unselected_groups(
    ranking_scores: Tensor, num_groups: int, num_top_groups: int
) -> Tensor:  # [T, N] -> [T, N]
    """Return the ranking scores with -inf for the experts of groups that are not selected."""
    grouped = ranking_scores.view(len(ranking_scores), num_groups, -1)  # [T, G, N / G]
    group_scores = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(-1)  # [T, G]
    is_masked = torch.ones_like(group_scores, dtype=torch.bool)
    is_masked.scatter_(1, _select_largest(group_scores, num_top_groups), False)
    return grouped.masked_fill(is_masked[..., None], -torch.inf).flatten(1)


def _sparse_mixer(logits: Tensor, top_k: int, eps: float) -> tuple[Tensor, Tensor]:
    unselected_logits, weights, ids = logits, [], []
    for _ in range(top_k):
        best_ids = _select_largest(unselected_logits, 1)  # [T, 1]
        best_logits = unselected_logits.gather(-1, best_ids)
        is_far = (best_logits - logits) / torch.maximum(logits.abs(), best_logits) > 2 * eps
        weights.append(unselected_logits.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, best_ids))
        ids.append(best_ids)
        unselected_logits = unselected_logits.scatter(-1, best_ids, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(ids, dim=-1)
