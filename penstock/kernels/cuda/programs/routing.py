"""Routing: selects the experts with the largest logits of each row, and computes their softmax weights."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route(
    topk_weights, topk_ids, logits, experts, row_stride, TOP: tl.constexpr, WIDTH: tl.constexpr,
    ROUTING: tl.constexpr,
):  # fmt: skip
    """Store the ids and softmax weights of the TOP experts with the largest logits of one row.

    Grid: rows. Experts whose logit is NaN rank last. The softmax is over all experts if ``ROUTING`` is
    ``all``, else over the selected experts.
    """
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, WIDTH)
    is_expert = ids < experts
    scores = tl.load(logits + row * row_stride + ids, mask=is_expert, other=float("-inf")).to(tl.float32)
    is_nan = scores != scores
    largest = tl.max(tl.where(is_nan, float("-inf"), scores), 0)
    exponentials = tl.where(is_expert, tl.exp(scores - largest), 0.0)
    state = tl.where(is_expert, tl.where(is_nan, 1, 2), 0)  # 0: selected, 1: not a number, 2: a number
    total = tl.sum(exponentials, 0)
    is_selected = tl.zeros([WIDTH], tl.int32)
    for _ in range(TOP):
        best_state = tl.max(state, 0)
        best = tl.max(tl.where((state == best_state) & (best_state == 2), scores, float("-inf")), 0)
        is_best = (state == best_state) & ((best_state == 1) | (scores == best))
        expert = tl.min(tl.where(is_best, ids, 2147483647), 0)
        is_selected = tl.where(ids == expert, 1, is_selected)
        state = tl.where(ids == expert, 0, state)
    if ROUTING != "all":
        total = tl.sum(tl.where(is_selected == 1, exponentials, 0.0), 0)
    state = tl.where(is_selected == 1, tl.where(is_nan, 1, 2), 0)
    for index in range(TOP):
        best_state = tl.max(state, 0)
        best = tl.max(tl.where((state == best_state) & (best_state == 2), scores, float("-inf")), 0)
        is_best = (state == best_state) & ((best_state == 1) | (scores == best))
        expert = tl.min(tl.where(is_best, ids, 2147483647), 0)
        exponential = tl.sum(tl.where(ids == expert, exponentials, 0.0), 0)
        tl.store(topk_weights + row * TOP + index, exponential / total)
        tl.store(topk_ids + row * TOP + index, expert.to(tl.int64))
        state = tl.where(ids == expert, 0, state)
