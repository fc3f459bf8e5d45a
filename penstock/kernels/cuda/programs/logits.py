"""Functions of logits that the programs of the sampler share."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(0)
"""The field of the largest logit of each chunk."""
FIRST = tl.constexpr(1)
"""The field of the first token with this logit."""
COUNT = tl.constexpr(2)
"""The field of the number of listed tokens of each chunk."""
SPARE = tl.constexpr(3)
"""A field that `draw` uses."""
HISTOGRAM = tl.constexpr(4)
"""The first field of the histograms; each bin is a field."""
NUM_BINS = tl.constexpr(16)
"""Bins of a histogram. The last one has no lower end."""
NUM_FIELDS = tl.constexpr(20)
"""Number of fields."""


@triton.jit
def logits_of(logits, start, vocabulary, CHUNK: tl.constexpr):
    """Return the logits of a chunk of tokens as float32, -inf beyond the vocabulary."""
    tokens = start + tl.arange(0, CHUNK)
    return tl.load(logits + tokens, mask=tokens < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def allowed(scores, bitmask, start, vocabulary, CHUNK: tl.constexpr, HAS_MASK: tl.constexpr):
    """Return the logits of a chunk with -inf for the tokens that the bitmask excludes."""
    if HAS_MASK:
        tokens = start + tl.arange(0, CHUNK)
        words = tl.load(bitmask + tokens // 32, mask=tokens < vocabulary, other=0)
        scores = tl.where((words >> (tokens % 32)) & 1 != 0, scores, float("-inf"))
    return scores


@triton.jit
def scores_of(logits, bitmask, start, vocabulary, CHUNK: tl.constexpr, HAS_MASK: tl.constexpr):
    """Return the logits of a chunk of a valid row, -inf for excluded tokens and beyond the vocabulary."""
    scores = logits_of(logits, start, vocabulary, CHUNK)
    return allowed(scores, bitmask, start, vocabulary, CHUNK, HAS_MASK)


@triton.jit
def keys_of(scores, SHIFT: tl.constexpr):
    """Return int32 numbers in the order of float32 scores whose last ``SHIFT`` bits are 0; -0 is 0."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 2147483647), bits) >> SHIFT


@triton.jit
def score_of(key, SHIFT: tl.constexpr):
    """Return the float32 score of a key."""
    number = key.to(tl.int32) << SHIFT
    magnitude = tl.where(number < 0, -number, number).to(tl.float32, bitcast=True)
    return tl.where(number < 0, -magnitude, magnitude)


@triton.jit
def weights_of(scores, best, temperature):
    """Return the exponentials of scores in float64, relative to the largest one."""
    return tl.exp(scores.to(tl.float64) / temperature - best.to(tl.float64) / temperature)


@triton.jit
def field_of(fields, row, chunks, FIELD: tl.constexpr):
    """Return a pointer to a field of a row, which has a float32 for each chunk."""
    return fields + (row * NUM_FIELDS + FIELD) * chunks


@triton.jit
def integers_of(fields, row, chunks, FIELD: tl.constexpr):
    """Return a pointer to a field of a row, which has an int32 for each chunk."""
    return field_of(fields, row, chunks, FIELD).to(tl.pointer_type(tl.int32), bitcast=True)
