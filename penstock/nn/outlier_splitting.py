"""Outlier channel splitting (Zhao et al. 2019, arXiv:1901.09504) of feed-forward layers.

If all weights of an output share one scale, a single large weight makes the scale of the others coarse. The
second matrix of a feed-forward layer therefore gets some inputs several times, and a large weight is divided
among the copies. The first matrix computes these inputs several times. The product stays the same::

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
"""Inputs per repeated input: splitting makes a layer at most 1/24 wider."""
_MIN_GAIN = 0.1
"""Share of the sum of the squared scales that splitting must save; otherwise the layer is not changed."""
_CANDIDATES = 16
"""Number of largest weights of an output that can be divided."""
_AT_ONCE = 4
"""Inputs that are chosen before the scales are computed again."""


def load_split_mlp(
    load: Loader,
    up: Sequence[tuple[str, int]],
    down: str,
    sizes: tuple[int, int],
    *,
    up_bias: bool,
    down_bias: bool,
) -> tuple[Linear, Linear] | None:
    """Return the first and the second matrix of a feed-forward layer with repeated inner features.

    Args:
        load: reads the tensors.
        up: the full name and the number of outputs of each part of the first matrix, in order. The parts
            together have one or more outputs for each inner feature: ``[gate | up]`` in blocks of F.
        down: the full name of the second matrix.
        sizes: E and F.
        up_bias: whether the first matrix has a bias.
        down_bias: whether the second matrix has a bias.

    Returns:
        None if the layers are loaded as they are: their encoding has no coarse scales, or splitting does not
        make them finer.
    """
    hidden, inner = sizes
    count = min(load.max_repeated_inputs, inner // _INPUTS_PER_REPEAT)
    if not count or any(load.source.stored_encoding(f"{name}.weight") for name in (down, *dict(up))):
        return None
    weight = load.source.tensor(f"{down}.weight", (hidden, inner))
    repeated = repeated_inputs(weight, count)
    if not len(repeated):
        return None

    def widened(rows: Tensor) -> Tensor:  # [blocks * F, ...] -> [blocks * (F + R), ...]
        blocks = rows.view(-1, inner, *rows.shape[1:])
        return torch.cat([blocks, blocks[:, repeated]], dim=1).flatten(0, 1)

    def read(kind: str, *shape: int) -> Tensor:
        return torch.cat([load.source.tensor(f"{name}.{kind}", (size, *shape)) for name, size in up])

    parts = {name: size + size // inner * len(repeated) for name, size in up}
    first = load.pack(widened(read("weight", hidden)), parts, bias=widened(read("bias")) if up_bias else None)
    bias = load.source.tensor(f"{down}.bias", (hidden,)) if down_bias else None
    return first, load.pack(with_repeated_inputs(weight, repeated), {down: hidden}, bias=bias)


def repeated_inputs(weight: Tensor, count: int) -> Tensor:
    """Return up to ``count`` inputs of ``weight [out, in]`` to repeat, int64; one may occur several times.

    The inputs are chosen one after the other, each time those that most reduce the sum of the squared scales
    of all outputs. The result is empty if the sum decreases by less than `_MIN_GAIN`.
    """
    in_features = weight.shape[1]
    largest, inputs = weight.float().abs().topk(min(_CANDIDATES, in_features), dim=1)  # [out, C]
    times = torch.ones(in_features)
    chosen: list[int] = []
    while len(chosen) < count:
        shares, places = (largest / times[inputs]).topk(2, dim=1)  # [out, 2]
        column, place = inputs.gather(1, places[:, :1])[:, 0], places[:, :1]
        divided = largest.gather(1, place)[:, 0] / (times[column] + 1)
        saved = shares[:, 0].square() - torch.maximum(shares[:, 1], divided).square()
        gains = torch.zeros(in_features).index_add_(0, column, saved)
        best = gains.topk(min(_AT_ONCE, count - len(chosen))).indices
        times[best] += 1
        chosen += best.tolist()
    after = (largest / times[inputs]).amax(1).square().sum()
    before = largest[:, 0].square().sum()
    is_finite = bool(before.isfinite()) and bool(before > 0)
    return torch.tensor(chosen if is_finite and after < (1 - _MIN_GAIN) * before else [], dtype=torch.int64)


def with_repeated_inputs(weight: Tensor, repeated: Tensor) -> Tensor:  # [out, in + R]
    """Return ``weight [out, in]`` in float32, followed by copies of the inputs ``repeated [R]``.

    The weights of an input and its copies add up to the original weight. All of them except one are the
    largest weight of the output or 0, which are multiples of its scale.
    """
    rest = weight.float()
    times = 1 + torch.bincount(repeated, minlength=rest.shape[1])
    limit = (rest.abs() / times).amax(1, keepdim=True)  # [out, 1]
    parts = [rest.clamp(-limit, limit)]
    rest = rest - parts[0]
    for column in repeated.tolist():
        part = rest[:, column, None].clamp(-limit, limit)
        rest[:, column, None] -= part
        parts.append(part)
    return torch.cat(parts, dim=1)
