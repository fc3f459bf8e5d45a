"""Outlier channel splitting (Zhao et al. 2019, arXiv:1901.09504) of feed-forward layers.

If all weights of an output share one quantization scale, a single large weight increases the rounding error
of all other weights. Therefore some inputs of the second matrix of a feed-forward layer are repeated, and a
large weight is divided among the copies of its input. The first matrix computes these inputs several times.
The product stays the same::

    down [E, F]                    down [E, F + 2]
    [ 0.1  -0.2   9.0 ]     ->     [ 0.1  -0.2   3.0 | 3.0  3.0 ]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.nn.linear import Linear
from penstock.nn.loader import Loader

_INPUTS_PER_REPEAT = 24
"""Minimum number of inputs of a layer per repeated input: a layer becomes at most 1/24 wider."""
_MIN_GAIN = 0.1
"""Relative reduction of the sum of squared scales that splitting must exceed; else the layer is unchanged."""
_NUM_CANDIDATES = 16
"""Number of the largest weights of each output that the search considers."""
_INPUTS_PER_ITERATION = 4
"""Number of inputs that the search chooses before it computes the scales again."""


def load_split_mlp(
    load: Loader,
    up_tensors: Sequence[tuple[str, int]],
    down_name: str,
    sizes: tuple[int, int],
    *,
    up_bias: bool,
    down_bias: bool,
) -> tuple[Linear, Linear] | None:
    """Return the first and the second matrix of a feed-forward layer with repeated inner features.

    Args:
        load: reads the tensors.
        up_tensors: the full name and the number of outputs of each tensor of the first matrix, in order. The
            outputs are F for ``up``, preceded by F for ``gate`` if the layer has a gate. One tensor can store
            both.
        down_name: the full name of the second matrix.
        sizes: E and F.
        up_bias: whether the first matrix has a bias.
        down_bias: whether the second matrix has a bias.

    Returns:
        The two matrices. None if the layers must be loaded unchanged: the loader permits no repeated inputs,
        F is below 24, a layer is stored quantized, or splitting reduces the scales too little.
    """
    hidden, inner = sizes
    num_repeated = min(load.max_repeated_inputs, inner // _INPUTS_PER_REPEAT)
    if not num_repeated or any(
        load.source.stored_encoding(f"{name}.weight") for name in (down_name, *dict(up_tensors))
    ):
        return None
    weight = load.source.tensor(f"{down_name}.weight", (hidden, inner))
    repeated = repeated_inputs(weight, num_repeated)
    if not len(repeated):
        return None

    def repeat_features(rows: Tensor) -> Tensor:  # [blocks * F, ...] -> [blocks * (F + R), ...]
        blocks = rows.view(-1, inner, *rows.shape[1:])
        return torch.cat([blocks, blocks[:, repeated]], dim=1).flatten(0, 1)

    def read(kind: str, *shape: int) -> Tensor:
        return torch.cat([load.source.tensor(f"{name}.{kind}", (size, *shape)) for name, size in up_tensors])

    parts = {name: size + size // inner * len(repeated) for name, size in up_tensors}
    split_up = load.pack(
        repeat_features(read("weight", hidden)),
        parts,
        bias=repeat_features(read("bias")) if up_bias else None,
    )
    bias = load.source.tensor(f"{down_name}.bias", (hidden,)) if down_bias else None
    return split_up, load.pack(with_repeated_inputs(weight, repeated), {down_name: hidden}, bias=bias)


def repeated_inputs(weight: Tensor, num_repeated: int) -> Tensor:
    """Return the inputs of ``weight [out, in]`` to repeat: ``num_repeated`` indices or none, int64.

    An input may occur several times. In each iteration, a greedy search chooses the inputs whose repetition
    reduces the sum of the squared scales of all outputs most. The result is empty if the relative reduction
    of the sum is at most `_MIN_GAIN`, or if a weight is not finite or all weights are 0.
    """
    in_features = weight.shape[1]
    largest_weights, inputs = weight.float().abs().topk(min(_NUM_CANDIDATES, in_features), dim=1)  # [out, C]
    copies = torch.ones(in_features)
    chosen_inputs: list[int] = []
    while len(chosen_inputs) < num_repeated:
        two_largest, two_candidates = (largest_weights / copies[inputs]).topk(2, dim=1)  # [out, 2]
        column, candidate = inputs.gather(1, two_candidates[:, :1])[:, 0], two_candidates[:, :1]
        split_weight = largest_weights.gather(1, candidate)[:, 0] / (copies[column] + 1)
        reduction = two_largest[:, 0].square() - torch.maximum(two_largest[:, 1], split_weight).square()
        gains = torch.zeros(in_features).index_add_(0, column, reduction)
        best_inputs = gains.topk(min(_INPUTS_PER_ITERATION, num_repeated - len(chosen_inputs))).indices
        copies[best_inputs] += 1
        chosen_inputs += best_inputs.tolist()
    sum_after = (largest_weights / copies[inputs]).amax(1).square().sum()
    sum_before = largest_weights[:, 0].square().sum()
    is_valid = bool(sum_before.isfinite()) and bool(sum_before > 0)
    return torch.tensor(
        chosen_inputs if is_valid and sum_after < (1 - _MIN_GAIN) * sum_before else [], dtype=torch.int64
    )


def with_repeated_inputs(weight: Tensor, repeated: Tensor) -> Tensor:  # [out, in + R]
    """Return ``weight [out, in]`` in float32, followed by copies of the inputs ``repeated [R]``.

    The weights of an input and its copies add up to the original weight. At most one of them has a rounding
    error in the quantized weight: every other one is 0 or has the largest magnitude of the output's row, and
    these values are exact multiples of the row's scale.
    """
    remainder = weight.float()
    copies = 1 + torch.bincount(repeated, minlength=remainder.shape[1])
    limit = (remainder.abs() / copies).amax(1, keepdim=True)  # [out, 1]
    parts = [remainder.clamp(-limit, limit)]
    remainder = remainder - parts[0]
    for column in repeated.tolist():
        part = remainder[:, column, None].clamp(-limit, limit)
        remainder[:, column, None] -= part
        parts.append(part)
    return torch.cat(parts, dim=1)
