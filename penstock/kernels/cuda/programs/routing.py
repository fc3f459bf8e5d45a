"""Routing: selects the experts with the largest logits of each row, and computes their softmax weights."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route(
    topk_weights, topk_ids, logits, num_experts, row_stride, TOP: tl.constexpr, WIDTH: tl.constexpr,
    ROUTING: tl.constexpr,
):  # fmt: skip
    """Store the ids and softmax weights of the TOP experts with the largest logits of one row.

    Grid: rows. Experts whose logit is NaN rank last. The softmax is over all experts if ``ROUTING`` is
    ``all``, else over the selected experts.
    """
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, WIDTH)
    is_expert = ids < num_experts
    scores = tl.load(logits + row * row_stride + ids, mask=is_expert, other=float("-inf")).to(tl.float32)
    is_nan = scores != scores
    largest = tl.max(tl.where(is_nan, float("-inf"), scores), 0)
    exponentials = tl.where(is_expert, tl.exp(scores - largest), 0.0)
    kind = tl.where(is_expert, tl.where(is_nan, 1, 2), 0)  # 0: no candidate, 1: NaN, 2: a number
    total = tl.sum(exponentials, 0)
    is_selected = tl.zeros([WIDTH], tl.int32)
    for _ in range(TOP):
        best_kind = tl.max(kind, 0)
        best_score = tl.max(tl.where((kind == best_kind) & (best_kind == 2), scores, float("-inf")), 0)
        is_best = (kind == best_kind) & ((best_kind == 1) | (scores == best_score))
        expert = tl.min(tl.where(is_best, ids, 2147483647), 0)
        is_selected = tl.where(ids == expert, 1, is_selected)
        kind = tl.where(ids == expert, 0, kind)
    if ROUTING != "all":
        total = tl.sum(tl.where(is_selected == 1, exponentials, 0.0), 0)
    kind = tl.where(is_selected == 1, tl.where(is_nan, 1, 2), 0)
    for choice in range(TOP):
        best_kind = tl.max(kind, 0)
        best_score = tl.max(tl.where((kind == best_kind) & (best_kind == 2), scores, float("-inf")), 0)
        is_best = (kind == best_kind) & ((best_kind == 1) | (scores == best_score))
        expert = tl.min(tl.where(is_best, ids, 2147483647), 0)
        exponential = tl.sum(tl.where(ids == expert, exponentials, 0.0), 0)
        tl.store(topk_weights + row * TOP + choice, exponential / total)
        tl.store(topk_ids + row * TOP + choice, expert.to(tl.int64))
        kind = tl.where(ids == expert, 0, kind)
