"""The token of a row whose rules are neither greedy nor invalid: from a list, a whole row or chunk masses.

The kept tokens are those above a threshold, a number that `keys_of` returns, and the first ones equal to it.
Tokens that are equal have the same weight, so sums over the first of them are products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.logits import keys_of, score_of, scores_of, weights_of

_WAYS = tl.constexpr(8)
"""Number of thresholds that one pass of a search compares."""


@triton.jit
def _between(low, high):
    """Return int64 thresholds from low to high; the last one is high."""
    return low + (high - low) * (tl.arange(0, _WAYS) + 1).to(tl.int64) // _WAYS


@triton.jit
def _narrowed(thresholds, held, wanted, low, high, above):
    """Return the range of the smallest threshold above which less than ``wanted`` is held.

    Args:
        thresholds: ascending numbers between low and high.
        held: what the tokens above each of them hold.
        wanted: the number to compare with.
        low: the smallest number that is possible.
        high: the largest one.
        above: what the tokens above ``high`` hold, which is also returned.
    """
    is_enough = held < wanted
    low = tl.maximum(low, tl.max(tl.where(is_enough, low, thresholds + 1), 0))
    high = tl.minimum(high, tl.min(tl.where(is_enough, thresholds, high), 0))
    above = tl.maximum(above, tl.max(tl.where(is_enough, held, 0.0), 0))
    return low, high, above


@triton.jit
def _kept(keys, ranks, threshold, limit, above, each, wanted):
    """Return the mask of kept tokens; ``ranks`` counts the tokens equal to the threshold.

    The first token at the threshold is kept. Further ones are kept up to ``limit``, and while those before
    them hold less than ``wanted``.
    """
    is_first = (ranks < limit) & ((ranks == 0) | (above + ranks.to(tl.float64) * each < wanted))
    return (keys > threshold) | ((keys == threshold) & is_first)


@triton.jit
def _target(uniform, total):
    """Return the number that the cumulative sum of the drawn token exceeds."""
    # If the product rounds up to the total, the number below the total selects the last kept token.
    bits = total.to(tl.int64, bitcast=True) - 1
    return tl.minimum(uniform * total, bits.to(tl.float64, bitcast=True))


@triton.jit
def _at(target, cumulative, weights, numbers):
    """Return the first number whose cumulative sum exceeds the target, else the last one with a weight.

    Sums of the same weights in another order can round to less than the target.
    """
    has_weight = weights > 0
    found = tl.min(tl.where(has_weight & (cumulative > target), numbers, 2147483647), 0)
    last = tl.max(tl.where(has_weight, numbers, -1), 0)
    return tl.where(found == 2147483647, last, found)


@triton.jit
def draw_from_list(
    logits, offsets, ends, listed, mass, best, temperature, top_k, top_p, min_p, uniform, vocabulary, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the token of a row whose listed tokens, at most ``SIZE``, include all that are kept.

    ``mass`` is the mass of all tokens, if the row has no top_k. ``ends`` are the sums of the numbers of
    listed tokens.
    """
    place = tl.arange(0, SIZE)
    is_listed = place < listed
    chunk = tl.zeros((SIZE,), tl.int32)
    step = tl.full((), CHUNKS // 2, tl.int32)
    while step > 0:  # the number of chunks whose lists end before this place
        end = tl.load(ends + chunk + step - 1, mask=is_listed & (chunk + step <= chunks), other=2147483647)
        chunk = tl.where(end <= place, chunk + step, chunk)
        step = step // 2
    begin = tl.load(ends + chunk - 1, mask=is_listed & (chunk > 0), other=0)
    offset = tl.load(offsets + chunk * CHUNK + place - begin, mask=is_listed, other=0)
    tokens = chunk * CHUNK + offset.to(tl.int32)
    scores = tl.load(logits + tokens, mask=is_listed, other=float("-inf")).to(tl.float32)
    keys = keys_of(scores, SHIFT)
    weights = tl.where(is_listed, weights_of(scores, best, temperature), 0.0)

    top = keys_of(best, SHIFT).to(tl.int64)
    threshold = tl.min(tl.where(is_listed, keys, 2147483647), 0).to(tl.int64)
    limit = tl.full((), 0, tl.int32) + listed
    above = tl.full((), 0.0, tl.float64)
    wanted = tl.full((), float("inf"), tl.float64)
    each = tl.full((), 0.0, tl.float64)
    if (top_k > 0) & (top_k < vocabulary):
        threshold, above = _first_of_list(
            keys, is_listed.to(tl.float64), threshold, top, top_k.to(tl.float64)
        )
        num_equal = tl.sum((keys == threshold).to(tl.int32), 0)
        limit = tl.minimum(num_equal, (top_k - above.to(tl.int64)).to(tl.int32))
        own = weights_of(score_of(threshold, SHIFT), best, temperature)
        mass = tl.sum(tl.where(keys > threshold, weights, 0.0), 0) + limit.to(tl.float64) * own
    if top_p < 1:
        wanted = top_p * mass
        smallest = threshold
        threshold, above = _first_of_list(keys, weights, threshold, top, wanted)
        each = weights_of(score_of(threshold, SHIFT), best, temperature)
        limit = tl.where(threshold == smallest, limit, listed)
    ranks = tl.cumsum((keys == threshold).to(tl.int32), 0) - 1
    is_kept = _kept(keys, ranks, threshold, limit, above, each, wanted)
    weights = tl.where(is_kept & (weights >= min_p), weights, 0.0)
    cumulative = tl.cumsum(weights, 0)
    return _at(_target(uniform, tl.max(cumulative, 0)), cumulative, weights, tokens)


@triton.jit
def _first_of_list(keys, measures, low, high, wanted):
    """Return the smallest threshold above which measures sum to less than ``wanted``, and their sum."""
    above = tl.full((), 0.0, tl.float64)
    while low < high:
        thresholds = _between(low, high)
        is_above = keys[None, :] > thresholds.to(tl.int32)[:, None]
        held = tl.sum(tl.where(is_above, measures[None, :], 0.0), 1)
        low, high, above = _narrowed(thresholds, held, wanted, low, high, above)
    return high, above


@triton.jit
def draw_from_row(
    logits, bitmask, seen, masses, mass, low, high, best, temperature, top_k, top_p, min_p, uniform,
    vocabulary, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SHIFT: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Return the token of a row by passes over all its tokens.

    Args:
        logits: the row.
        bitmask: its bits.
        seen: memory for an integer per chunk.
        masses: memory for a float64 per chunk.
        mass: the mass of all tokens, if the row has no top_k.
        low: the smallest possible threshold of the first rule.
        high: the largest one.
        best: the largest logit.
        temperature: the temperature, and the other rules of the row.
        top_k: see temperature.
        top_p: see temperature.
        min_p: see temperature.
        uniform: the random number.
        vocabulary: the number of tokens.
        chunks: the number of chunks.
        CHUNK: the number of tokens per chunk.
        CHUNKS: a power of two, at least ``chunks``.
        SHIFT: see `keys_of`.
        HAS_MASK: whether bits are read.
    """
    threshold = low
    limit = tl.full((), 2147483647, tl.int32)
    above = tl.full((), 0.0, tl.float64)
    wanted = tl.full((), float("inf"), tl.float64)
    each = tl.full((), 0.0, tl.float64)
    if (top_k > 0) & (top_k < vocabulary):
        threshold, above = _first_of_row(
            logits, bitmask, low, high, top_k.to(tl.float64), best, temperature, vocabulary, SHIFT, True,
            HAS_MASK,
        )  # fmt: skip
        limit = (top_k - above.to(tl.int64)).to(tl.int32)
        if top_p < 1:
            held = _held_by_row(
                logits, bitmask, _between(threshold, threshold), best, temperature, vocabulary, SHIFT, False,
                HAS_MASK,
            )  # fmt: skip
            own = weights_of(score_of(threshold, SHIFT), best, temperature)
            mass = tl.max(held, 0) + limit.to(tl.float64) * own
            low, high = threshold, keys_of(best, SHIFT).to(tl.int64)
    if top_p < 1:
        wanted = top_p * mass
        smallest = threshold
        threshold, above = _first_of_row(
            logits, bitmask, low, high, wanted, best, temperature, vocabulary, SHIFT, False, HAS_MASK
        )
        each = weights_of(score_of(threshold, SHIFT), best, temperature)
        limit = tl.where(threshold == smallest, limit, 2147483647)
    before = tl.full((), 0, tl.int32)
    for chunk in range(0, chunks):
        scores = scores_of(logits, bitmask, chunk * CHUNK, vocabulary, CHUNK, HAS_MASK)
        keys = keys_of(scores, SHIFT)
        is_equal = (keys == threshold).to(tl.int32)
        ranks = before + tl.cumsum(is_equal, 0) - 1
        weights = weights_of(scores, best, temperature)
        is_kept = _kept(keys, ranks, threshold, limit, above, each, wanted) & (weights >= min_p)
        tl.store(masses + chunk, tl.sum(tl.where(is_kept, weights, 0.0), 0))
        tl.store(seen + chunk, before)
        before += tl.sum(is_equal, 0)
    tl.debug_barrier()  # other threads read the masses
    return draw_from_chunks(
        logits, bitmask, seen, masses, best, temperature, min_p, uniform, threshold, limit, above, each,
        wanted, vocabulary, chunks, CHUNK, CHUNKS, SHIFT, True, HAS_MASK,
    )  # fmt: skip


@triton.jit
def _first_of_row(
    logits, bitmask, low, high, wanted, best, temperature, vocabulary,
    SHIFT: tl.constexpr, IS_COUNT: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Return the smallest threshold above which the row holds less than ``wanted``, and what it holds."""
    above = tl.full((), 0.0, tl.float64)
    num_passes = tl.full((), 0, tl.int32)
    while (low < high) | (num_passes == 0):  # one pass at least: it finds what is above ``high``
        thresholds = _between(low, high)
        held = _held_by_row(
            logits, bitmask, thresholds, best, temperature, vocabulary, SHIFT, IS_COUNT, HAS_MASK
        )
        low, high, above = _narrowed(thresholds, held, wanted, low, high, above)
        num_passes += 1
    return high, above


@triton.jit
def _held_by_row(
    logits, bitmask, thresholds, best, temperature, vocabulary,
    SHIFT: tl.constexpr, IS_COUNT: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Return the number or the mass of the tokens above each threshold."""
    BLOCK: tl.constexpr = 2048
    held = tl.zeros((_WAYS, BLOCK), tl.float64)
    limits = thresholds.to(tl.int32)
    for start in range(0, vocabulary, BLOCK):
        scores = scores_of(logits, bitmask, start, vocabulary, BLOCK, HAS_MASK)
        keys = keys_of(scores, SHIFT)
        if IS_COUNT:
            measures = (scores > float("-inf")).to(tl.float64)
        else:
            measures = weights_of(scores, best, temperature)
        held += tl.where(keys[None, :] > limits[:, None], measures[None, :], 0.0)
    return tl.sum(held, 1)


@triton.jit
def draw_from_chunks(
    logits, bitmask, seen, masses, best, temperature, min_p, uniform, threshold, limit, above, each, wanted,
    vocabulary, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SHIFT: tl.constexpr, IS_LIMITED: tl.constexpr,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Return the token of a row by the masses of the kept tokens of each chunk.

    Without ``IS_LIMITED`` all tokens are kept that min_p keeps, and the arguments of `_kept` are not used.
    ``seen`` is the number of tokens at the threshold before each chunk.
    """
    numbers = tl.arange(0, CHUNKS)
    mass = tl.load(masses + numbers, mask=numbers < chunks, other=0.0)
    cumulative = tl.cumsum(mass, 0)
    target = _target(uniform, tl.max(cumulative, 0))
    chunk = _at(target, cumulative, mass, numbers)
    before = tl.max(tl.where(numbers < chunk, cumulative, 0.0), 0)
    scores = scores_of(logits, bitmask, chunk * CHUNK, vocabulary, CHUNK, HAS_MASK)
    weights = weights_of(scores, best, temperature)
    is_kept = weights >= min_p
    if IS_LIMITED:
        keys = keys_of(scores, SHIFT)
        ranks = tl.load(seen + chunk) + tl.cumsum((keys == threshold).to(tl.int32), 0) - 1
        is_kept = is_kept & _kept(keys, ranks, threshold, limit, above, each, wanted)
    weights = tl.where(is_kept, weights, 0.0)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    return _at(target, before + tl.cumsum(weights, 0), weights, tokens)
