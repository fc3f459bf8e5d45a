"""Draws the token of a row that is neither greedy nor invalid.

Tokens are compared by their keys, the integers that `sort_keys` returns. The *weight* of a token is the
number that `exp_weights` returns, and the *mass* of several tokens is the sum of their weights. Each rule
(top_k, top_p) has a *threshold*. It keeps the tokens with a larger key, and some of the *ties*, the tokens
whose key equals the threshold: those with the smallest ids. Ties have the same weight, so the mass of n ties
is n times this weight. The *amount* of tokens is their number for top_k, and their mass for top_p.

`draw_from_list` reads the tokens that `sampling.select` has listed. `draw_from_row` reads all tokens of the
row several times. `draw_from_chunks` selects a chunk by the mass of its kept tokens, and reads only the
tokens of this chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.logits import exp_weights, load_allowed_logits, score_from_key, sort_keys

_NUM_THRESHOLDS = tl.constexpr(8)
"""Number of thresholds that a search compares in one pass."""


@triton.jit
def _make_thresholds(low, high):
    """Return evenly spaced int64 thresholds above ``low``, of which the last is ``high``.

    If ``low`` and ``high`` are close or equal, thresholds repeat, and the first may equal ``low``.
    """
    return low + (high - low) * (tl.arange(0, _NUM_THRESHOLDS) + 1).to(tl.int64) // _NUM_THRESHOLDS


@triton.jit
def _narrow_range(thresholds, amounts, target_amount, low, high, amount_above):
    """Narrow a search for the smallest threshold above which tokens have less than a target amount.

    Args:
        thresholds: ascending numbers between ``low`` and ``high``.
        amounts: the amount of the tokens above each of ``thresholds``.
        target_amount: the target amount.
        low: the smallest possible threshold.
        high: the largest possible threshold.
        amount_above: the amount of the tokens above ``high``.

    Returns:
        The new ``low``, ``high`` and ``amount_above``.
    """
    is_high_enough = amounts < target_amount
    low = tl.maximum(low, tl.max(tl.where(is_high_enough, low, thresholds + 1), 0))
    high = tl.minimum(high, tl.min(tl.where(is_high_enough, thresholds, high), 0))
    amount_above = tl.maximum(amount_above, tl.max(tl.where(is_high_enough, amounts, 0.0), 0))
    return low, high, amount_above


@triton.jit
def _kept_mask(keys, tie_ranks, threshold, max_ties, amount_above, tie_weight, target_amount):
    """Return the mask of kept tokens.

    Tokens with a key above the threshold are kept. A tie is kept if its index ``tie_ranks`` among the ties is
    below ``max_ties``, and if it is the first tie or the tokens before it have less than ``target_amount``.
    """
    amount_before = amount_above + tie_ranks.to(tl.float64) * tie_weight
    is_kept_tie = (tie_ranks < max_ties) & ((tie_ranks == 0) | (amount_before < target_amount))
    return (keys > threshold) | ((keys == threshold) & is_kept_tie)


@triton.jit
def _draw_target(uniform, total):
    """Return the target of the draw: the drawn token is the first whose cumulative sum exceeds it."""
    # If the product rounds up to the total, the next float64 below the total selects the last kept token.
    bits = total.to(tl.int64, bitcast=True) - 1
    return tl.minimum(uniform * total, bits.to(tl.float64, bitcast=True))


@triton.jit
def _find_token(target, cumulative, weights, ids):
    """Return the first of ``ids`` whose weight is above 0 and whose cumulative sum exceeds the target.

    Returns the last number with a weight above 0 if no cumulative sum exceeds the target. This can happen,
    because sums of the same weights in another order can round to less than the target.
    """
    has_weight = weights > 0
    first = tl.min(tl.where(has_weight & (cumulative > target), ids, 2147483647), 0)
    last = tl.max(tl.where(has_weight, ids, -1), 0)
    return tl.where(first == 2147483647, last, first)


@triton.jit
def draw_from_list(
    logits, listed_offsets, list_ends, num_listed, mass, max_logit, temperature, top_k, top_p, min_p, uniform,
    vocabulary_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row from a list of at most ``SIZE`` tokens, which includes all kept tokens.

    The list is the concatenation of the lists of the chunks. ``list_ends [num_chunks]`` has the end of each
    chunk's list in the concatenation. ``listed_offsets [num_chunks, CHUNK]`` has, for each chunk, the offsets
    of its listed tokens in the chunk. ``mass`` is the mass of all tokens of the row. It is not used if the
    row has a top_k.
    """
    positions = tl.arange(0, SIZE)
    is_listed = positions < num_listed
    chunk_numbers = tl.zeros((SIZE,), tl.int32)
    step = tl.full((), CHUNKS // 2, tl.int32)
    while step > 0:  # binary search for the number of chunks whose lists end at or before each position
        list_end = tl.load(
            list_ends + chunk_numbers + step - 1,
            mask=is_listed & (chunk_numbers + step <= num_chunks),
            other=2147483647,
        )
        chunk_numbers = tl.where(list_end <= positions, chunk_numbers + step, chunk_numbers)
        step = step // 2
    list_begins = tl.load(list_ends + chunk_numbers - 1, mask=is_listed & (chunk_numbers > 0), other=0)
    offsets_in_chunk = tl.load(
        listed_offsets + chunk_numbers * CHUNK + positions - list_begins, mask=is_listed, other=0
    )
    tokens = chunk_numbers * CHUNK + offsets_in_chunk.to(tl.int32)
    scores = tl.load(logits + tokens, mask=is_listed, other=float("-inf")).to(tl.float32)
    keys = sort_keys(scores, SHIFT)
    weights = tl.where(is_listed, exp_weights(scores, max_logit, temperature), 0.0)

    top_key = sort_keys(max_logit, SHIFT).to(tl.int64)
    threshold = tl.min(tl.where(is_listed, keys, 2147483647), 0).to(tl.int64)
    max_ties = tl.full((), 0, tl.int32) + num_listed
    amount_above = tl.full((), 0.0, tl.float64)
    target_amount = tl.full((), float("inf"), tl.float64)
    tie_weight = tl.full((), 0.0, tl.float64)
    if (top_k > 0) & (top_k < vocabulary_size):
        threshold, amount_above = _find_threshold_in_list(
            keys, is_listed.to(tl.float64), threshold, top_key, top_k.to(tl.float64)
        )
        num_ties = tl.sum((keys == threshold).to(tl.int32), 0)
        max_ties = tl.minimum(num_ties, (top_k - amount_above.to(tl.int64)).to(tl.int32))
        threshold_weight = exp_weights(score_from_key(threshold, SHIFT), max_logit, temperature)
        mass = tl.sum(tl.where(keys > threshold, weights, 0.0), 0)
        mass += max_ties.to(tl.float64) * threshold_weight
    if top_p < 1:
        target_amount = top_p * mass
        previous_threshold = threshold
        threshold, amount_above = _find_threshold_in_list(keys, weights, threshold, top_key, target_amount)
        tie_weight = exp_weights(score_from_key(threshold, SHIFT), max_logit, temperature)
        max_ties = tl.where(threshold == previous_threshold, max_ties, num_listed)
    tie_ranks = tl.cumsum((keys == threshold).to(tl.int32), 0) - 1
    is_kept = _kept_mask(keys, tie_ranks, threshold, max_ties, amount_above, tie_weight, target_amount)
    weights = tl.where(is_kept & (weights >= min_p), weights, 0.0)
    cumulative = tl.cumsum(weights, 0)
    return _find_token(_draw_target(uniform, tl.max(cumulative, 0)), cumulative, weights, tokens)


@triton.jit
def _find_threshold_in_list(keys, measures, low, high, target_amount):
    """Return the smallest threshold above which ``measures`` sum to less than a target, and that sum."""
    amount_above = tl.full((), 0.0, tl.float64)
    while low < high:
        thresholds = _make_thresholds(low, high)
        is_above = keys[None, :] > thresholds.to(tl.int32)[:, None]
        amounts = tl.sum(tl.where(is_above, measures[None, :], 0.0), 1)
        low, high, amount_above = _narrow_range(thresholds, amounts, target_amount, low, high, amount_above)
    return high, amount_above


@triton.jit
def draw_from_row(
    logits, bitmask, ties_before, masses, mass, low, high, max_logit, temperature, top_k, top_p, min_p,
    uniform, vocabulary_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SHIFT: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row by several passes over all its tokens.

    Args:
        logits: the logits of the row.
        bitmask: the bitmask of the row.
        ties_before: memory for an int32 per chunk.
        masses: memory for a float64 per chunk.
        mass: the mass of all tokens; not used if the row has a top_k.
        low: the smallest possible threshold of the first rule (top_k, or else top_p).
        high: the largest possible threshold of the first rule.
        max_logit: the largest logit of the row.
        temperature: the temperature of the row.
        top_k: the top_k of the row.
        top_p: the top_p of the row.
        min_p: the min_p of the row.
        uniform: the random number of the row.
        vocabulary_size: number of tokens.
        num_chunks: number of chunks.
        CHUNK: number of tokens per chunk.
        CHUNKS: a power of two, at least ``num_chunks``.
        SHIFT: see `sort_keys`.
        HAS_MASK: whether there is a bitmask.
    """
    threshold = low
    max_ties = tl.full((), 2147483647, tl.int32)
    amount_above = tl.full((), 0.0, tl.float64)
    target_amount = tl.full((), float("inf"), tl.float64)
    tie_weight = tl.full((), 0.0, tl.float64)
    if (top_k > 0) & (top_k < vocabulary_size):
        threshold, amount_above = _find_threshold_in_row(
            logits, bitmask, low, high, top_k.to(tl.float64), max_logit, temperature, vocabulary_size, SHIFT,
            True, HAS_MASK,
        )  # fmt: skip
        max_ties = (top_k - amount_above.to(tl.int64)).to(tl.int32)
        if top_p < 1:
            amounts = _amounts_above(
                logits, bitmask, _make_thresholds(threshold, threshold), max_logit, temperature,
                vocabulary_size, SHIFT, False, HAS_MASK,
            )  # fmt: skip
            threshold_weight = exp_weights(score_from_key(threshold, SHIFT), max_logit, temperature)
            mass = tl.max(amounts, 0) + max_ties.to(tl.float64) * threshold_weight
            low, high = threshold, sort_keys(max_logit, SHIFT).to(tl.int64)
    if top_p < 1:
        target_amount = top_p * mass
        previous_threshold = threshold
        threshold, amount_above = _find_threshold_in_row(
            logits,
            bitmask,
            low,
            high,
            target_amount,
            max_logit,
            temperature,
            vocabulary_size,
            SHIFT,
            False,
            HAS_MASK,
        )
        tie_weight = exp_weights(score_from_key(threshold, SHIFT), max_logit, temperature)
        max_ties = tl.where(threshold == previous_threshold, max_ties, 2147483647)
    num_ties_before = tl.full((), 0, tl.int32)
    for chunk in range(0, num_chunks):
        scores = load_allowed_logits(logits, bitmask, chunk * CHUNK, vocabulary_size, CHUNK, HAS_MASK)
        keys = sort_keys(scores, SHIFT)
        is_tie = (keys == threshold).to(tl.int32)
        tie_ranks = num_ties_before + tl.cumsum(is_tie, 0) - 1
        weights = exp_weights(scores, max_logit, temperature)
        is_kept = _kept_mask(
            keys, tie_ranks, threshold, max_ties, amount_above, tie_weight, target_amount
        ) & (weights >= min_p)
        tl.store(masses + chunk, tl.sum(tl.where(is_kept, weights, 0.0), 0))
        tl.store(ties_before + chunk, num_ties_before)
        num_ties_before += tl.sum(is_tie, 0)
    tl.debug_barrier()  # other threads of the program read these masses
    return draw_from_chunks(
        logits, bitmask, ties_before, masses, max_logit, temperature, min_p, uniform, threshold, max_ties,
        amount_above, tie_weight, target_amount, vocabulary_size, num_chunks, CHUNK, CHUNKS, SHIFT, True,
        HAS_MASK,
    )  # fmt: skip


@triton.jit
def _find_threshold_in_row(
    logits, bitmask, low, high, target_amount, max_logit, temperature, vocabulary_size,
    SHIFT: tl.constexpr, IS_COUNT: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Return the smallest threshold above which the row has less than a target amount, and this amount."""
    amount_above = tl.full((), 0.0, tl.float64)
    num_passes = tl.full((), 0, tl.int32)
    while (low < high) | (num_passes == 0):  # at least one pass, which computes the amount above ``high``
        thresholds = _make_thresholds(low, high)
        amounts = _amounts_above(
            logits, bitmask, thresholds, max_logit, temperature, vocabulary_size, SHIFT, IS_COUNT, HAS_MASK
        )
        low, high, amount_above = _narrow_range(thresholds, amounts, target_amount, low, high, amount_above)
        num_passes += 1
    return high, amount_above


@triton.jit
def _amounts_above(
    logits, bitmask, thresholds, max_logit, temperature, vocabulary_size,
    SHIFT: tl.constexpr, IS_COUNT: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Return the number (IS_COUNT) or the mass of the tokens above each threshold."""
    BLOCK: tl.constexpr = 2048
    amounts = tl.zeros((_NUM_THRESHOLDS, BLOCK), tl.float64)
    int32_thresholds = thresholds.to(tl.int32)
    for start in range(0, vocabulary_size, BLOCK):
        scores = load_allowed_logits(logits, bitmask, start, vocabulary_size, BLOCK, HAS_MASK)
        keys = sort_keys(scores, SHIFT)
        if IS_COUNT:
            measures = (scores > float("-inf")).to(tl.float64)
        else:
            measures = exp_weights(scores, max_logit, temperature)
        amounts += tl.where(keys[None, :] > int32_thresholds[:, None], measures[None, :], 0.0)
    return tl.sum(amounts, 1)


@triton.jit
def draw_from_chunks(
    logits, bitmask, ties_before, masses, max_logit, temperature, min_p, uniform, threshold, max_ties,
    amount_above, tie_weight, target_amount, vocabulary_size, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SHIFT: tl.constexpr, IS_LIMITED: tl.constexpr,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row from the masses of the kept tokens of each chunk.

    ``ties_before`` has the number of ties before each chunk. Without ``IS_LIMITED`` only min_p restricts the
    tokens, and the arguments of `_kept_mask` are not used.
    """
    chunk_numbers = tl.arange(0, CHUNKS)
    chunk_masses = tl.load(masses + chunk_numbers, mask=chunk_numbers < num_chunks, other=0.0)
    cumulative = tl.cumsum(chunk_masses, 0)
    target = _draw_target(uniform, tl.max(cumulative, 0))
    chunk = _find_token(target, cumulative, chunk_masses, chunk_numbers)
    mass_before = tl.max(tl.where(chunk_numbers < chunk, cumulative, 0.0), 0)
    scores = load_allowed_logits(logits, bitmask, chunk * CHUNK, vocabulary_size, CHUNK, HAS_MASK)
    weights = exp_weights(scores, max_logit, temperature)
    is_kept = weights >= min_p
    if IS_LIMITED:
        keys = sort_keys(scores, SHIFT)
        tie_ranks = tl.load(ties_before + chunk) + tl.cumsum((keys == threshold).to(tl.int32), 0) - 1
        is_kept = is_kept & _kept_mask(
            keys, tie_ranks, threshold, max_ties, amount_above, tie_weight, target_amount
        )
    weights = tl.where(is_kept, weights, 0.0)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    return _find_token(target, mass_before + tl.cumsum(weights, 0), weights, tokens)
