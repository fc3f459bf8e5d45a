"""Functions of logits and the layout of intermediate results for the programs of the sampler.

The intermediate results of a row are NUM_FIELDS fields. A field has a 32-bit number for each chunk of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(0)
"""Index of the field with the largest logit of each chunk."""
FIRST = tl.constexpr(1)
"""Index of the field with the first token of each chunk that has the chunk's largest logit."""
COUNT = tl.constexpr(2)
"""Index of the field with the number of listed tokens of each chunk."""
SCRATCH = tl.constexpr(3)
"""Index of a field that only `sampling.draw` uses."""
HISTOGRAM = tl.constexpr(4)
"""Index of the first field of the histograms. Each bin is a field with a number for each chunk."""
NUM_BINS = tl.constexpr(16)
"""Number of bins of a histogram. The last bin has no lower end."""
NUM_FIELDS = tl.constexpr(20)
"""Number of fields."""


@triton.jit
def load_logits(logits, start, vocabulary_size, CHUNK: tl.constexpr):
    """Return the logits of a chunk of tokens as float32, -inf beyond the vocabulary."""
    tokens = start + tl.arange(0, CHUNK)
    return tl.load(logits + tokens, mask=tokens < vocabulary_size, other=float("-inf")).to(tl.float32)


@triton.jit
def apply_bitmask(scores, bitmask, start, vocabulary_size, CHUNK: tl.constexpr, HAS_MASK: tl.constexpr):
    """Return the logits of a chunk with -inf for the tokens that the bitmask forbids."""
    if HAS_MASK:
        tokens = start + tl.arange(0, CHUNK)
        words = tl.load(bitmask + tokens // 32, mask=tokens < vocabulary_size, other=0)
        scores = tl.where((words >> (tokens % 32)) & 1 != 0, scores, float("-inf"))
    return scores


@triton.jit
def load_allowed_logits(logits, bitmask, start, vocabulary_size, CHUNK: tl.constexpr, HAS_MASK: tl.constexpr):
    """Return the logits of a chunk of a valid row, -inf for forbidden tokens and beyond the vocabulary."""
    scores = load_logits(logits, start, vocabulary_size, CHUNK)
    return apply_bitmask(scores, bitmask, start, vocabulary_size, CHUNK, HAS_MASK)


@triton.jit
def sort_keys(scores, SHIFT: tl.constexpr):
    """Return int32 keys in the same order as float32 scores, whose last ``SHIFT`` bits must be 0.

    The keys of 0 and -0 are equal.
    """
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 2147483647), bits) >> SHIFT


@triton.jit
def score_from_key(key, SHIFT: tl.constexpr):
    """Return the float32 score of a key."""
    number = key.to(tl.int32) << SHIFT
    magnitude = tl.where(number < 0, -number, number).to(tl.float32, bitcast=True)
    return tl.where(number < 0, -magnitude, magnitude)


@triton.jit
def exp_weights(scores, max_logit, temperature):
    """Return ``exp((score - max_logit) / temperature)`` of scores in float64."""
    return tl.exp(scores.to(tl.float64) / temperature - max_logit.to(tl.float64) / temperature)


@triton.jit
def field_pointer(fields, row, num_chunks, FIELD: tl.constexpr):
    """Return a pointer to a field of a row with a float32 for each chunk."""
    return fields + (row * NUM_FIELDS + FIELD) * num_chunks


@triton.jit
def integer_field_pointer(fields, row, num_chunks, FIELD: tl.constexpr):
    """Return a pointer to a field of a row with an int32 for each chunk."""
    return field_pointer(fields, row, num_chunks, FIELD).to(tl.pointer_type(tl.int32), bitcast=True)
