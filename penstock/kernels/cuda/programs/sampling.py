"""Sampling of one token per row, as `Ops.sample` defines it, in float64 and without sorting.

Tokens are ranked by logit, then by id. Each rule keeps a prefix of this order, so it is represented by the
smallest kept logit and the number of kept tokens with exactly this logit. Both are found by bisection over
the bits of the logits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _keys(scores):
    """Return int64 numbers in the order of float32 scores; -0 is 0."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -2147483648 - bits.to(tl.int64), bits.to(tl.int64))


@triton.jit
def _scores(logits, bitmask, start, vocabulary, CHUNK: tl.constexpr, HAS_MASK: tl.constexpr):
    """Return the logits of a chunk of tokens, whether a logit is NaN or infinite, and the tokens."""
    tokens = start + tl.arange(0, CHUNK)
    is_token = tokens < vocabulary
    scores = tl.load(logits + tokens, mask=is_token, other=float("-inf")).to(tl.float32)
    is_bad = is_token & ((scores != scores) | (scores == float("inf")))
    scores = tl.where(is_bad, float("-inf"), scores)
    if HAS_MASK:
        words = tl.load(bitmask + tokens // 32, mask=is_token, other=0)
        scores = tl.where((words >> (tokens % 32)) & 1 != 0, scores, float("-inf"))
    return scores, is_bad, tokens


@triton.jit
def _weights(scores, top, temperature):
    """Return the exponentials of scores ``[CHUNK]`` in float64, relative to the largest one."""
    return tl.exp(scores.to(tl.float64) / temperature - top.to(tl.float64) / temperature)


@triton.jit
def _last_mass(mass, weights):
    """Return the mass after a chunk, given the mass before it: that of its last token with a weight.

    A parallel sum adds the weights of each token in another order. A token without a weight could
    therefore have a larger mass than the last token with one.
    """
    return tl.max(tl.where(weights > 0, mass + tl.cumsum(weights, 0), mass), 0)


@triton.jit
def _kept(scores, keys, seen, threshold, num_equal):
    """Return the mask of kept tokens of a chunk: those above the threshold, and the first ones equal to it.

    ``seen`` is the number of tokens at the threshold in previous chunks. Also returns the number after this
    chunk.
    """
    is_equal = (keys == threshold) & (scores > float("-inf"))
    ranks = seen + tl.cumsum(is_equal.to(tl.int32), 0) - 1
    is_kept = (keys > threshold) | (is_equal & (ranks < num_equal))
    return is_kept & (scores > float("-inf")), seen + tl.sum(is_equal.to(tl.int32), 0)


@triton.jit
def sample(
    out,
    logits,
    bitmask,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    vocabulary,
    row_stride,
    mask_stride,
    CHUNK: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Sample the token of one row. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    bitmask += row * mask_stride
    temperature = tl.load(temperatures + row).to(tl.float64)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row).to(tl.float64)
    min_p = tl.load(min_ps + row).to(tl.float64)

    best = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    num_bad = tl.full((), 0, tl.int32)
    for start in range(0, vocabulary, CHUNK):
        scores, is_bad, tokens = _scores(logits, bitmask, start, vocabulary, CHUNK, HAS_MASK)
        num_bad += tl.sum(is_bad.to(tl.int32), 0)
        largest = tl.max(scores, 0)
        first = tl.min(tl.where(scores == largest, tokens, 2147483647), 0)
        token = tl.where(largest > best, first, token)
        best = tl.maximum(best, largest)
    is_valid = (num_bad == 0) & (best > float("-inf"))
    if is_valid & (temperature > 0) & (top_k != 1):
        token = _draw(
            logits, bitmask, best, temperature, top_k, top_p, min_p, tl.load(uniforms + row), vocabulary,
            CHUNK, HAS_MASK,
        )  # fmt: skip
    tl.store(out + row, tl.where(is_valid, token, -1).to(tl.int64))


@triton.jit
def _draw(
    logits,
    bitmask,
    best,
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    vocabulary,
    CHUNK: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Return the inverse CDF at ``uniform`` over the kept tokens in token-id order."""
    threshold = tl.full((), -3000000000, tl.int64)  # below all keys: everything is kept
    num_equal = tl.full((), 0, tl.int32) + vocabulary
    if (top_k > 0) & (top_k < vocabulary):
        threshold, num_equal = _first_k(logits, bitmask, best, top_k, vocabulary, CHUNK, HAS_MASK)
    if top_p < 1:
        threshold, num_equal = _first_p(
            logits, bitmask, best, temperature, top_p, threshold, num_equal, vocabulary, CHUNK, HAS_MASK
        )
    total = tl.full((), 0.0, tl.float64)
    seen = tl.full((), 0, tl.int32)
    for start in range(0, vocabulary, CHUNK):
        scores, _, _ = _scores(logits, bitmask, start, vocabulary, CHUNK, HAS_MASK)
        is_kept, seen = _kept(scores, _keys(scores), seen, threshold, num_equal)
        weights = _weights(scores, best, temperature)
        weights = tl.where(is_kept & (weights >= min_p), weights, 0.0)
        total = _last_mass(total, weights)
    # If the product rounds up to the total, the number below the total selects the last kept token.
    bits = total.to(tl.int64, bitcast=True) - 1
    target = tl.minimum(uniform * total, bits.to(tl.float64, bitcast=True))
    mass = tl.full((), 0.0, tl.float64)
    seen = tl.full((), 0, tl.int32)
    found = tl.full((), 2147483647, tl.int32)
    last = tl.full((), 0, tl.int32)
    for start in range(0, vocabulary, CHUNK):
        scores, _, tokens = _scores(logits, bitmask, start, vocabulary, CHUNK, HAS_MASK)
        is_kept, seen = _kept(scores, _keys(scores), seen, threshold, num_equal)
        weights = _weights(scores, best, temperature)
        weights = tl.where(is_kept & (weights >= min_p), weights, 0.0)
        masses = mass + tl.cumsum(weights, 0)
        found = tl.minimum(found, tl.min(tl.where((masses > target) & (weights > 0), tokens, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, tokens, 0), 0))
        mass = _last_mass(mass, weights)
    return tl.minimum(found, last)


@triton.jit
def _first_k(logits, bitmask, best, top_k, vocabulary, CHUNK: tl.constexpr, HAS_MASK: tl.constexpr):
    """Return the key of the k-th token and the number of tokens with this key among the first k."""
    low = tl.full((), -2200000000, tl.int64)
    high = _keys(best)
    while low < high:  # the largest key that at least k tokens reach
        middle = low + (high - low + 1) // 2
        count = tl.full((), 0, tl.int32)
        for start in range(0, vocabulary, CHUNK):
            scores, _, tokens = _scores(logits, bitmask, start, vocabulary, CHUNK, HAS_MASK)
            count += tl.sum(((_keys(scores) >= middle) & (tokens < vocabulary)).to(tl.int32), 0)
        is_reached = count >= top_k
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle - 1)
    above = tl.full((), 0, tl.int32)
    for start in range(0, vocabulary, CHUNK):
        scores, _, _ = _scores(logits, bitmask, start, vocabulary, CHUNK, HAS_MASK)
        above += tl.sum((_keys(scores) > low).to(tl.int32), 0)
    return low, (top_k - above).to(tl.int32)


@triton.jit
def _first_p(
    logits,
    bitmask,
    best,
    temperature,
    top_p,
    threshold,
    num_equal,
    vocabulary,
    CHUNK: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Return the threshold and number of equal tokens after top_p; both arguments are those after top_k.

    A token stays while the tokens before it hold less than ``top_p`` of the kept mass.
    """
    wanted = top_p * _mass(
        logits, bitmask, best, temperature, threshold - 1, threshold, num_equal, vocabulary, CHUNK, HAS_MASK
    )
    low = tl.maximum(threshold, -2200000000)
    high = _keys(best)
    while low < high:  # the smallest key that keeps tokens: the mass above it is less than wanted
        middle = low + (high - low) // 2
        mass = _mass(
            logits, bitmask, best, temperature, middle, threshold, num_equal, vocabulary, CHUNK, HAS_MASK
        )
        is_enough = mass < wanted
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    above = _mass(logits, bitmask, best, temperature, low, threshold, num_equal, vocabulary, CHUNK, HAS_MASK)
    each = tl.full((), 0.0, tl.float64)
    count = tl.full((), 0, tl.int32)
    for start in range(0, vocabulary, CHUNK):
        scores, _, _ = _scores(logits, bitmask, start, vocabulary, CHUNK, HAS_MASK)
        is_equal = (_keys(scores) == low) & (scores > float("-inf"))
        count += tl.sum(is_equal.to(tl.int32), 0)
        each = tl.maximum(each, tl.max(tl.where(is_equal, _weights(scores, best, temperature), 0.0), 0))
    limit = tl.where(low == threshold, num_equal, count)
    kept = tl.full((), 0, tl.int32)
    before = above
    while (kept < limit) & ((before < wanted) | (kept == 0)):
        kept += 1
        before = tl.where(each > 0, before + each, wanted)
    return low, kept


@triton.jit
def _mass(
    logits,
    bitmask,
    best,
    temperature,
    floor,
    threshold,
    num_equal,
    vocabulary,
    CHUNK: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Return the sum of weights of the kept tokens with keys above ``floor``."""
    mass = tl.full((), 0.0, tl.float64)
    seen = tl.full((), 0, tl.int32)
    for start in range(0, vocabulary, CHUNK):
        scores, _, _ = _scores(logits, bitmask, start, vocabulary, CHUNK, HAS_MASK)
        keys = _keys(scores)
        is_kept, seen = _kept(scores, keys, seen, threshold, num_equal)
        mass += tl.sum(tl.where(is_kept & (keys > floor), _weights(scores, best, temperature), 0.0), 0)
    return mass
