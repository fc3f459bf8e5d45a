"""Sampling of one token per row, as `Ops.sample` defines it, in float64 and without sorting.

Three programs run one after the other. Each row is divided into chunks of tokens.

1. `summarize` finds the largest logit of each chunk. For rows with top_k or top_p it also makes a histogram.
2. `select` finds with the histograms of all chunks a limit below which no token is kept, and lists the tokens
   of its chunk above the limit. It adds up the weights of its chunk.
3. `draw` finds the kept tokens among the listed ones and returns the token of the row.

Tokens are ranked by logit, then by id. Each rule keeps a prefix of this order, so it is represented by the
smallest kept logit and the number of kept tokens with exactly this logit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.draws import draw_from_chunks, draw_from_list, draw_from_row
from penstock.kernels.cuda.programs.logits import (
    COUNT,
    FIRST,
    HISTOGRAM,
    LARGEST,
    NUM_BINS,
    SPARE,
    allowed,
    field_of,
    integers_of,
    keys_of,
    logits_of,
    scores_of,
    weights_of,
)

_BINS_PER_LOGIT = tl.constexpr(4.0)
"""Bins per unit of a logit, in histograms of numbers of tokens."""
_BINS_PER_NAT = tl.constexpr(2.0)
"""Bins per unit of a logit divided by the temperature, in histograms of weights."""
_FARTHEST = tl.constexpr(4096)
"""Largest distance from the largest logit, in bins, at which a limit is searched."""


@triton.jit
def _bins(scores, temperature, is_top_k):
    """Return the numbers of the bins of scores, as float64: equal functions of the score in all programs."""
    scale = tl.where(is_top_k, _BINS_PER_LOGIT, _BINS_PER_NAT / temperature)
    return tl.floor(scores.to(tl.float64) * scale)


@triton.jit
def summarize(
    fields, logits, bitmask, temperatures, top_ks, top_ps, vocabulary, chunks, row_stride, mask_stride,
    CHUNK: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Write the largest logit of a chunk, its first token and a histogram. Grid: rows, chunks.

    The largest logit of a chunk with a NaN or +inf is +inf. Bins are counted from that of the largest logit.
    A histogram has numbers of tokens if the row has a top_k, else weights relative to this logit.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row).to(tl.float64)
    top_k = tl.load(top_ks + row)
    is_top_k = (top_k > 0) & (top_k < vocabulary)
    is_limited = is_top_k | (tl.load(top_ps + row) < 1)
    start = chunk * CHUNK
    scores = logits_of(logits + row * row_stride, start, vocabulary, CHUNK)
    is_bad = (scores != scores) | (scores == float("inf"))
    scores = tl.where(is_bad, float("-inf"), scores)
    scores = allowed(scores, bitmask + row * mask_stride, start, vocabulary, CHUNK, HAS_MASK)
    tokens = start + tl.arange(0, CHUNK)
    largest = tl.max(scores, 0)
    first = tl.min(tl.where(scores == largest, tokens, 2147483647), 0)
    num_bad = tl.sum(is_bad.to(tl.int32), 0)
    maximum = tl.where(num_bad > 0, float("inf"), largest)
    tl.store(field_of(fields, row, chunks, LARGEST) + chunk, maximum)
    tl.store(integers_of(fields, row, chunks, FIRST) + chunk, first)
    if (temperature > 0) & (top_k != 1) & is_limited:
        is_token = scores > float("-inf")
        distances = _bins(largest, temperature, is_top_k) - _bins(scores, temperature, is_top_k)
        own = tl.where(is_token, tl.minimum(distances, NUM_BINS - 1), NUM_BINS - 1).to(tl.int32)
        exponents = (scores.to(tl.float64) - largest.to(tl.float64)) / temperature
        numbers = tl.where(is_top_k, 1.0, tl.exp(exponents.to(tl.float32)))
        numbers = tl.where(is_token, numbers, 0.0)
        bins = tl.arange(0, NUM_BINS)
        histogram = tl.sum(tl.where(own[None, :] == bins[:, None], numbers[None, :], 0.0), 1)
        tl.store(field_of(fields, row, chunks, HISTOGRAM) + bins * chunks + chunk, histogram)


@triton.jit
def select(
    fields, masses, offsets, logits, bitmask, temperatures, top_ks, top_ps, min_ps, vocabulary, chunks,
    row_stride, mask_stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """List the tokens that may be kept of some chunks, and write their number. Grid: rows, parts of the row.

    Also writes the mass of each chunk: of all tokens if the row has a top_p and no top_k, of the tokens that
    min_p keeps if it has neither. Nothing is written for rows that take the largest logit.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row).to(tl.float64)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row).to(tl.float64)
    is_top_k = (top_k > 0) & (top_k < vocabulary)
    is_limited = is_top_k | (top_p < 1)
    maxima = field_of(fields, row, chunks, LARGEST)
    numbers = tl.arange(0, CHUNKS)
    largest = tl.load(maxima + numbers, mask=numbers < chunks, other=float("-inf"))
    best = tl.max(largest, 0)
    is_valid = (best > float("-inf")) & (best < float("inf"))
    if is_valid & (temperature > 0) & (top_k != 1):
        smallest = tl.where(is_limited, 0.0, tl.load(min_ps + row).to(tl.float64))
        top_bin = _bins(best, temperature, is_top_k)
        farthest = tl.full((), float("inf"), tl.float64)
        if is_limited:
            histograms = field_of(fields, row, chunks, HISTOGRAM)
            limit = _limit(
                histograms, largest, best, temperature, top_k, top_p, vocabulary, chunks, CHUNKS, False
            )
            farthest = tl.where(limit > _FARTHEST, farthest, limit.to(tl.float64))
        for chunk in range(tl.program_id(1), chunks, tl.num_programs(1)):
            nearest = top_bin - _bins(tl.load(maxima + chunk), temperature, is_top_k)
            count = tl.full((), 0, tl.int32)
            if (is_top_k == 0) | (nearest <= farthest):
                scores = scores_of(
                    logits + row * row_stride, bitmask + row * mask_stride, chunk * CHUNK, vocabulary, CHUNK,
                    HAS_MASK,
                )  # fmt: skip
                if is_limited:
                    distances = top_bin - _bins(scores, temperature, is_top_k)
                    is_listed = (scores > float("-inf")) & (distances <= farthest)
                    places = tl.cumsum(is_listed.to(tl.int32), 0) - 1
                    listed = offsets + (row * chunks + chunk) * CHUNK
                    tl.store(listed + places, tl.arange(0, CHUNK).to(tl.int16), mask=is_listed)
                    count = tl.sum(is_listed.to(tl.int32), 0)
                if is_top_k == 0:
                    weights = weights_of(scores, best, temperature)
                    mass = tl.sum(tl.where(weights >= smallest, weights, 0.0), 0)
                    tl.store(masses + row * chunks + chunk, mass)
            tl.store(integers_of(fields, row, chunks, COUNT) + chunk, count)


@triton.jit
def _limit(
    histograms, largest, best, temperature, top_k, top_p, vocabulary, chunks,
    CHUNKS: tl.constexpr, IS_NEAR: tl.constexpr,
):  # fmt: skip
    """Return a distance in bins from the largest logit such that no token farther away is kept.

    With ``IS_NEAR`` all tokens that are nearer than the distance are kept. The distance is above `_FARTHEST`
    if there is none. Masses are float32, so more than top_p of the mass must be nearer, or less. The tokens
    of a last bin, which has no lower end, may be at any distance beyond its upper end.

    The second limit of top_p does not depend on the histograms: tokens whose weight is at most
    ``(1 - top_p) / (2 vocabulary)`` of the largest one hold at most half of the mass that top_p removes.
    """
    FACTOR: tl.constexpr = 0.9999 if IS_NEAR else 1.0001
    is_top_k = (top_k > 0) & (top_k < vocabulary)
    chunk, bins = tl.arange(0, CHUNKS), tl.arange(0, NUM_BINS)
    held = tl.load(
        histograms + bins[None, :] * chunks + chunk[:, None], mask=chunk[:, None] < chunks, other=0.0
    )
    exponents = (largest.to(tl.float64) - best.to(tl.float64)) / temperature
    held *= tl.where(is_top_k, 1.0, tl.exp(exponents.to(tl.float32)))[:, None]
    total = tl.sum(tl.sum(held, 1), 0)
    wanted = tl.where(is_top_k, top_k.to(tl.float32), (total * (top_p * FACTOR)).to(tl.float32))
    apart = _bins(best, temperature, is_top_k) - _bins(largest, temperature, is_top_k)
    apart = tl.minimum(apart, _FARTHEST + 1).to(tl.int32)
    distances = apart[:, None] + bins[None, :]
    if not IS_NEAR:
        distances = tl.where(bins[None, :] == NUM_BINS - 1, _FARTHEST + 1, distances)
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 0, tl.int32) + _FARTHEST + 1
    while low < high:  # the nearest distance that holds as much as is wanted
        middle = (low + high) // 2
        is_enough = tl.sum(tl.sum(tl.where(distances <= middle, held, 0.0), 1), 0) >= wanted
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    if not IS_NEAR:
        share = (1 - top_p) / (2.0 * vocabulary)
        nats = -tl.log(tl.maximum(share, 1e-30).to(tl.float32))
        second = (nats * _BINS_PER_NAT).to(tl.int32) + 2
        low = tl.where(is_top_k | (top_p >= 1), low, tl.minimum(low, second))
    return low


@triton.jit
def _range(
    histograms, largest, best, temperature, top_k, top_p, vocabulary, chunks,
    CHUNKS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the smallest and the largest possible threshold of the first rule of a row, as int64."""
    is_top_k = (top_k > 0) & (top_k < vocabulary)
    near = _limit(histograms, largest, best, temperature, top_k, top_p, vocabulary, chunks, CHUNKS, True)
    far = _limit(histograms, largest, best, temperature, top_k, top_p, vocabulary, chunks, CHUNKS, False)
    top_bin = _bins(best, temperature, is_top_k)
    width = tl.where(is_top_k, 1 / _BINS_PER_LOGIT, temperature / _BINS_PER_NAT)
    # One bin more on both sides, because the products round.
    lowest = tl.maximum((top_bin - far.to(tl.float64) - 1) * width, -3.4028234663852886e38)
    highest = tl.minimum((top_bin - near.to(tl.float64) + 2) * width, best.to(tl.float64))
    low = keys_of(lowest.to(tl.float32), SHIFT)
    low = tl.where(far > _FARTHEST, -2139095040 >> SHIFT, low)  # the number of -inf
    high = tl.where(near > _FARTHEST, best, highest.to(tl.float32))
    return low.to(tl.int64), tl.minimum(keys_of(high, SHIFT) + 1, keys_of(best, SHIFT)).to(tl.int64)


@triton.jit
def draw(
    out, fields, masses, offsets, logits, bitmask, temperatures, top_ks, top_ps, min_ps, uniforms, vocabulary,
    chunks, row_stride, mask_stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr, SHIFT: tl.constexpr,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Write the token of one row. Grid: rows.

    ``FEW`` and ``MANY`` are the numbers of listed tokens that are held in registers. ``SHIFT`` is the number
    of low bits that are 0 in every logit.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    bitmask += row * mask_stride
    masses += row * chunks
    offsets += row * chunks * CHUNK
    temperature = tl.load(temperatures + row).to(tl.float64)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row).to(tl.float64)
    is_top_k = (top_k > 0) & (top_k < vocabulary)
    ends = integers_of(fields, row, chunks, SPARE)
    histograms = field_of(fields, row, chunks, HISTOGRAM)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < chunks
    largest = tl.load(field_of(fields, row, chunks, LARGEST) + chunk, mask=is_chunk, other=float("-inf"))
    best = tl.max(largest, 0)
    first = tl.load(integers_of(fields, row, chunks, FIRST) + chunk, mask=is_chunk, other=2147483647)
    token = tl.min(tl.where(largest == best, first, 2147483647), 0)
    is_valid = (best > float("-inf")) & (best < float("inf"))
    if is_valid & (temperature > 0) & (top_k != 1):
        min_p = tl.load(min_ps + row).to(tl.float64)
        uniform = tl.load(uniforms + row)
        if is_top_k | (top_p < 1):
            count = tl.load(integers_of(fields, row, chunks, COUNT) + chunk, mask=is_chunk, other=0)
            tl.store(ends + chunk, tl.cumsum(count, 0), mask=is_chunk)
            listed = tl.sum(count, 0)
            mass = tl.full((), 0.0, tl.float64)
            if is_top_k == 0:
                mass = tl.sum(tl.load(masses + chunk, mask=is_chunk, other=0.0), 0)
            tl.debug_barrier()  # other threads read the ends of the lists
            if listed <= FEW:
                token = draw_from_list(
                    logits, offsets, ends, listed, mass, best, temperature, top_k, top_p, min_p, uniform,
                    vocabulary, chunks, CHUNK, CHUNKS, FEW, SHIFT,
                )  # fmt: skip
            elif listed <= MANY:
                token = draw_from_list(
                    logits, offsets, ends, listed, mass, best, temperature, top_k, top_p, min_p, uniform,
                    vocabulary, chunks, CHUNK, CHUNKS, MANY, SHIFT,
                )  # fmt: skip
            else:
                low, high = _range(
                    histograms, largest, best, temperature, top_k, top_p, vocabulary, chunks, CHUNKS, SHIFT
                )
                token = draw_from_row(
                    logits, bitmask, ends, masses, mass, low, high, best, temperature, top_k, top_p, min_p,
                    uniform, vocabulary, chunks, CHUNK, CHUNKS, SHIFT, HAS_MASK,
                )  # fmt: skip
        else:
            token = draw_from_chunks(
                logits, bitmask, ends, masses, best, temperature, min_p, uniform, 0, 0, 0.0, 0.0, 0.0,
                vocabulary, chunks, CHUNK, CHUNKS, SHIFT, False, HAS_MASK,
            )  # fmt: skip
    tl.store(out + row, tl.where(is_valid, token, -1).to(tl.int64))
