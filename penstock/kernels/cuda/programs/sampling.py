"""Sampling of one token per row, as `Ops.sample` defines it, in float64 and without sorting.

Three programs run one after the other. Each row is divided into chunks of tokens.

1. `summarize` finds the largest logit of each chunk. For rows with top_k or top_p it also writes a histogram
   of the logits of each chunk.
2. `select` computes from the histograms of all chunks a limit below which top_k or top_p keep no token. It
   lists the tokens of each chunk whose logits are not below this limit. For rows without top_k it also adds
   up the weights (`exp_weights`) of the tokens of each chunk.
3. `draw` finds the kept tokens and draws one of them. If the list of tokens is short enough, `draw` reads
   only the listed tokens, else all tokens of the row.

Tokens are ranked by descending logit, then by ascending id. The rules top_k and top_p keep the first tokens
of this order. The result of a rule is therefore described by the smallest kept logit, and by the number of
kept tokens with exactly this logit.
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
    SCRATCH,
    apply_bitmask,
    exp_weights,
    field_pointer,
    integer_field_pointer,
    load_allowed_logits,
    load_logits,
    sort_keys,
)

_BINS_PER_LOGIT = tl.constexpr(4.0)
"""Number of bins per unit of a logit in histograms that count tokens."""
_BINS_PER_NAT = tl.constexpr(2.0)
"""Number of bins per unit of ``logit / temperature`` in histograms that add weights."""
_MAX_DISTANCE = tl.constexpr(4096)
"""Maximum distance of a limit from the largest logit, in bins.

If a limit would be farther, no limit is used.
"""


@triton.jit
def _find_bins(scores, temperature, is_top_k):
    """Return the bin numbers of scores as float64. All programs compute the same number for a score."""
    scale = tl.where(is_top_k, _BINS_PER_LOGIT, _BINS_PER_NAT / temperature)
    return tl.floor(scores.to(tl.float64) * scale)


@triton.jit
def summarize(
    fields, logits, bitmask, temperatures, top_ks, top_ps, vocabulary_size, num_chunks, logits_row_stride,
    bitmask_row_stride, CHUNK: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Write the largest logit of a chunk, the first token with this logit, and a histogram if it is needed.

    Grid: rows, chunks. If a chunk has a NaN or +inf, +inf is written as its largest logit. A histogram is
    written if the row is not greedy and has a top_k or top_p. Bin 0 of the histogram contains the largest
    logit of the chunk. The histogram counts tokens if the row has a top_k. Otherwise it adds weights relative
    to the largest logit of the chunk.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row).to(tl.float64)
    top_k = tl.load(top_ks + row)
    is_top_k = (top_k > 0) & (top_k < vocabulary_size)
    is_limited = is_top_k | (tl.load(top_ps + row) < 1)
    start = chunk * CHUNK
    scores = load_logits(logits + row * logits_row_stride, start, vocabulary_size, CHUNK)
    is_invalid = (scores != scores) | (scores == float("inf"))
    scores = tl.where(is_invalid, float("-inf"), scores)
    scores = apply_bitmask(
        scores, bitmask + row * bitmask_row_stride, start, vocabulary_size, CHUNK, HAS_MASK
    )
    tokens = start + tl.arange(0, CHUNK)
    largest = tl.max(scores, 0)
    first = tl.min(tl.where(scores == largest, tokens, 2147483647), 0)
    num_invalid = tl.sum(is_invalid.to(tl.int32), 0)
    largest_or_inf = tl.where(num_invalid > 0, float("inf"), largest)
    tl.store(field_pointer(fields, row, num_chunks, LARGEST) + chunk, largest_or_inf)
    tl.store(integer_field_pointer(fields, row, num_chunks, FIRST) + chunk, first)
    if (temperature > 0) & (top_k != 1) & is_limited:
        is_token = scores > float("-inf")
        distances = _find_bins(largest, temperature, is_top_k) - _find_bins(scores, temperature, is_top_k)
        token_bins = tl.where(is_token, tl.minimum(distances, NUM_BINS - 1), NUM_BINS - 1).to(tl.int32)
        exponents = (scores.to(tl.float64) - largest.to(tl.float64)) / temperature
        amounts = tl.where(is_top_k, 1.0, tl.exp(exponents.to(tl.float32)))
        amounts = tl.where(is_token, amounts, 0.0)
        bins = tl.arange(0, NUM_BINS)
        histogram = tl.sum(tl.where(token_bins[None, :] == bins[:, None], amounts[None, :], 0.0), 1)
        tl.store(field_pointer(fields, row, num_chunks, HISTOGRAM) + bins * num_chunks + chunk, histogram)


@triton.jit
def select(
    fields, masses, listed_offsets, logits, bitmask, temperatures, top_ks, top_ps, min_ps, vocabulary_size,
    num_chunks, logits_row_stride, bitmask_row_stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """For some chunks of a row, list the tokens that top_k or top_p may keep, and write the number of them.

    Grid: rows, programs per row. Each of the n programs of a row processes every n-th chunk. If the row has
    no top_k, the program also writes a sum of weights for each chunk: that of all tokens if the row has a
    top_p, else that of the tokens that min_p keeps. Nothing is written for greedy rows, rows with a NaN or
    +inf, and rows without an allowed logit above -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row).to(tl.float64)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row).to(tl.float64)
    is_top_k = (top_k > 0) & (top_k < vocabulary_size)
    is_limited = is_top_k | (top_p < 1)
    largest_field = field_pointer(fields, row, num_chunks, LARGEST)
    chunk_numbers = tl.arange(0, CHUNKS)
    largest = tl.load(largest_field + chunk_numbers, mask=chunk_numbers < num_chunks, other=float("-inf"))
    max_logit = tl.max(largest, 0)
    is_valid = (max_logit > float("-inf")) & (max_logit < float("inf"))
    if is_valid & (temperature > 0) & (top_k != 1):
        min_weight = tl.where(is_limited, 0.0, tl.load(min_ps + row).to(tl.float64))
        top_bin = _find_bins(max_logit, temperature, is_top_k)
        max_distance = tl.full((), float("inf"), tl.float64)
        if is_limited:
            histograms = field_pointer(fields, row, num_chunks, HISTOGRAM)
            limit = _distance_limit(
                histograms,
                largest,
                max_logit,
                temperature,
                top_k,
                top_p,
                vocabulary_size,
                num_chunks,
                CHUNKS,
                False,
            )
            max_distance = tl.where(limit > _MAX_DISTANCE, max_distance, limit.to(tl.float64))
        for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            min_distance = top_bin - _find_bins(tl.load(largest_field + chunk), temperature, is_top_k)
            num_listed = tl.full((), 0, tl.int32)
            if (is_top_k == 0) | (min_distance <= max_distance):
                scores = load_allowed_logits(
                    logits + row * logits_row_stride, bitmask + row * bitmask_row_stride, chunk * CHUNK,
                    vocabulary_size, CHUNK, HAS_MASK,
                )  # fmt: skip
                if is_limited:
                    distances = top_bin - _find_bins(scores, temperature, is_top_k)
                    is_listed = (scores > float("-inf")) & (distances <= max_distance)
                    positions = tl.cumsum(is_listed.to(tl.int32), 0) - 1
                    list_start = listed_offsets + (row * num_chunks + chunk) * CHUNK
                    tl.store(list_start + positions, tl.arange(0, CHUNK).to(tl.int16), mask=is_listed)
                    num_listed = tl.sum(is_listed.to(tl.int32), 0)
                if is_top_k == 0:
                    weights = exp_weights(scores, max_logit, temperature)
                    mass = tl.sum(tl.where(weights >= min_weight, weights, 0.0), 0)
                    tl.store(masses + row * num_chunks + chunk, mass)
            tl.store(integer_field_pointer(fields, row, num_chunks, COUNT) + chunk, num_listed)


@triton.jit
def _distance_limit(
    histograms, largest, max_logit, temperature, top_k, top_p, vocabulary_size, num_chunks,
    CHUNKS: tl.constexpr, IS_NEAR: tl.constexpr,
):  # fmt: skip
    """Return a distance from the largest logit, in bins, beyond which the first rule of a row keeps no token.

    The first rule is top_k, or top_p if the row has no top_k. The amount of tokens is their number for top_k,
    and the sum of their weights for top_p. The result is the smallest distance within which tokens have the
    amount that the rule keeps, or above `_MAX_DISTANCE` if no distance up to it is enough. The last bin of a
    chunk has no lower end, so its tokens may be at any distance beyond its upper end. These tokens count as
    too far. With ``IS_NEAR`` they count as at the upper end, and the last kept token is at least at the
    returned distance. Amounts are rounded to float32. To allow for this, FACTOR makes the distance of a top_p
    larger, or smaller with ``IS_NEAR``.

    Without ``IS_NEAR``, the result is limited further for a top_p below 1. The tokens whose weight is at most
    ``(1 - top_p) / (2 vocabulary_size)`` of the largest weight have at most half of the mass that top_p
    removes, so top_p keeps none of them.
    """
    FACTOR: tl.constexpr = 0.9999 if IS_NEAR else 1.0001
    is_top_k = (top_k > 0) & (top_k < vocabulary_size)
    chunk_numbers, bins = tl.arange(0, CHUNKS), tl.arange(0, NUM_BINS)
    amounts = tl.load(
        histograms + bins[None, :] * num_chunks + chunk_numbers[:, None],
        mask=chunk_numbers[:, None] < num_chunks,
        other=0.0,
    )
    exponents = (largest.to(tl.float64) - max_logit.to(tl.float64)) / temperature
    amounts *= tl.where(is_top_k, 1.0, tl.exp(exponents.to(tl.float32)))[:, None]
    total = tl.sum(tl.sum(amounts, 1), 0)
    target_amount = tl.where(is_top_k, top_k.to(tl.float32), (total * (top_p * FACTOR)).to(tl.float32))
    chunk_distances = _find_bins(max_logit, temperature, is_top_k) - _find_bins(
        largest, temperature, is_top_k
    )
    chunk_distances = tl.minimum(chunk_distances, _MAX_DISTANCE + 1).to(tl.int32)
    distances = chunk_distances[:, None] + bins[None, :]
    if not IS_NEAR:
        distances = tl.where(bins[None, :] == NUM_BINS - 1, _MAX_DISTANCE + 1, distances)
    low = tl.full((), 0, tl.int32)
    high = tl.full((), 0, tl.int32) + _MAX_DISTANCE + 1
    while low < high:  # binary search for the smallest distance within which the amount reaches the target
        middle = (low + high) // 2
        is_enough = tl.sum(tl.sum(tl.where(distances <= middle, amounts, 0.0), 1), 0) >= target_amount
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    if not IS_NEAR:
        max_weight = (1 - top_p) / (2.0 * vocabulary_size)
        nats = -tl.log(tl.maximum(max_weight, 1e-30).to(tl.float32))
        weight_distance = (nats * _BINS_PER_NAT).to(tl.int32) + 2
        low = tl.where(is_top_k | (top_p >= 1), low, tl.minimum(low, weight_distance))
    return low


@triton.jit
def _threshold_range(
    histograms, largest, max_logit, temperature, top_k, top_p, vocabulary_size, num_chunks,
    CHUNKS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the smallest and the largest possible threshold (`draws`) of the first rule of a row.

    Both are int64 keys. The first rule is top_k, or top_p if the row has no top_k.
    """
    is_top_k = (top_k > 0) & (top_k < vocabulary_size)
    near_distance = _distance_limit(
        histograms, largest, max_logit, temperature, top_k, top_p, vocabulary_size, num_chunks, CHUNKS, True
    )
    far_distance = _distance_limit(
        histograms, largest, max_logit, temperature, top_k, top_p, vocabulary_size, num_chunks, CHUNKS, False
    )
    top_bin = _find_bins(max_logit, temperature, is_top_k)
    bin_width = tl.where(is_top_k, 1 / _BINS_PER_LOGIT, temperature / _BINS_PER_NAT)
    # The range is one bin larger on both sides, because the product of a bin number and `bin_width` is
    # rounded.
    lowest = tl.maximum((top_bin - far_distance.to(tl.float64) - 1) * bin_width, -3.4028234663852886e38)
    highest = tl.minimum((top_bin - near_distance.to(tl.float64) + 2) * bin_width, max_logit.to(tl.float64))
    low = sort_keys(lowest.to(tl.float32), SHIFT)
    low = tl.where(far_distance > _MAX_DISTANCE, -2139095040 >> SHIFT, low)  # the key of -inf
    high = tl.where(near_distance > _MAX_DISTANCE, max_logit, highest.to(tl.float32))
    return low.to(tl.int64), tl.minimum(sort_keys(high, SHIFT) + 1, sort_keys(max_logit, SHIFT)).to(tl.int64)


@triton.jit
def draw(
    out, fields, masses, listed_offsets, logits, bitmask, temperatures, top_ks, top_ps, min_ps, uniforms,
    vocabulary_size, num_chunks, logits_row_stride, bitmask_row_stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SMALL_LIST: tl.constexpr, LARGE_LIST: tl.constexpr,
    SHIFT: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Write the token of one row; -1 if a logit is NaN or +inf, or if no allowed logit is above -inf.

    Grid: rows.

    Lists of up to ``SMALL_LIST`` or ``LARGE_LIST`` tokens are held in registers. If a list is longer, all
    tokens of the row are read again. ``SHIFT`` is the number of low bits that are 0 in every logit.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row_stride
    bitmask += row * bitmask_row_stride
    masses += row * num_chunks
    listed_offsets += row * num_chunks * CHUNK
    temperature = tl.load(temperatures + row).to(tl.float64)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row).to(tl.float64)
    is_top_k = (top_k > 0) & (top_k < vocabulary_size)
    list_ends = integer_field_pointer(fields, row, num_chunks, SCRATCH)
    histograms = field_pointer(fields, row, num_chunks, HISTOGRAM)
    chunk_numbers = tl.arange(0, CHUNKS)
    is_chunk = chunk_numbers < num_chunks
    largest = tl.load(
        field_pointer(fields, row, num_chunks, LARGEST) + chunk_numbers, mask=is_chunk, other=float("-inf")
    )
    max_logit = tl.max(largest, 0)
    first_tokens = tl.load(
        integer_field_pointer(fields, row, num_chunks, FIRST) + chunk_numbers, mask=is_chunk, other=2147483647
    )
    token = tl.min(tl.where(largest == max_logit, first_tokens, 2147483647), 0)
    is_valid = (max_logit > float("-inf")) & (max_logit < float("inf"))
    if is_valid & (temperature > 0) & (top_k != 1):
        min_p = tl.load(min_ps + row).to(tl.float64)
        uniform = tl.load(uniforms + row)
        if is_top_k | (top_p < 1):
            list_lengths = tl.load(
                integer_field_pointer(fields, row, num_chunks, COUNT) + chunk_numbers, mask=is_chunk, other=0
            )
            tl.store(list_ends + chunk_numbers, tl.cumsum(list_lengths, 0), mask=is_chunk)
            num_listed = tl.sum(list_lengths, 0)
            mass = tl.full((), 0.0, tl.float64)
            if is_top_k == 0:
                mass = tl.sum(tl.load(masses + chunk_numbers, mask=is_chunk, other=0.0), 0)
            tl.debug_barrier()  # other threads of the program read the ends of the lists
            if num_listed <= SMALL_LIST:
                token = draw_from_list(
                    logits, listed_offsets, list_ends, num_listed, mass, max_logit, temperature, top_k, top_p,
                    min_p, uniform, vocabulary_size, num_chunks, CHUNK, CHUNKS, SMALL_LIST, SHIFT,
                )  # fmt: skip
            elif num_listed <= LARGE_LIST:
                token = draw_from_list(
                    logits, listed_offsets, list_ends, num_listed, mass, max_logit, temperature, top_k, top_p,
                    min_p, uniform, vocabulary_size, num_chunks, CHUNK, CHUNKS, LARGE_LIST, SHIFT,
                )  # fmt: skip
            else:
                low, high = _threshold_range(
                    histograms,
                    largest,
                    max_logit,
                    temperature,
                    top_k,
                    top_p,
                    vocabulary_size,
                    num_chunks,
                    CHUNKS,
                    SHIFT,
                )
                token = draw_from_row(
                    logits, bitmask, list_ends, masses, mass, low, high, max_logit, temperature, top_k, top_p,
                    min_p, uniform, vocabulary_size, num_chunks, CHUNK, CHUNKS, SHIFT, HAS_MASK,
                )  # fmt: skip
        else:
            token = draw_from_chunks(
                logits, bitmask, list_ends, masses, max_logit, temperature, min_p, uniform, 0, 0, 0.0, 0.0,
                0.0, vocabulary_size, num_chunks, CHUNK, CHUNKS, SHIFT, False, HAS_MASK,
            )  # fmt: skip
    tl.store(out + row, tl.where(is_valid, token, -1).to(tl.int64))
