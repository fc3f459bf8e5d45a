"""Calibration: activation statistics for quantizing weights to few bits.

The effect of a rounding error of a weight on the output is proportional to the input of the weight. In
trained models, some inputs of a layer are a hundred times as large as its other inputs (Lin et al. 2023,
arXiv:2306.00978). The set of large inputs hardly depends on the text: statistics of 16 random tokens are as
good as statistics of 1,500 generated tokens. `pack_calibrated` therefore runs 16 random tokens through the
mapped float weights. It packs each layer except experts right after its first use, so that its weights are
read once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels import (
    Activation,
    KVCacheInputs,
    LazyWeight,
    LoRAInputs,
    Ops,
    PackedLinear,
    StepInputs,
    encoding_named,
)
from penstock.kv_cache import KVCacheManager, KVCacheSpec
from penstock.pipelines.core import TextContext

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

NUM_TOKENS = 16
_BLOCK_SIZE = 16
_MIN_IMPORTANCE = 1e-6
"""Value that is added to the importance of each input."""


class CalibrationNetwork(Protocol):
    """A network that computes hidden states, without the output head."""

    @property
    def is_length_dependent(self) -> bool:
        """Whether keys depend on the sequence length."""
        ...

    def __call__(self, tokens: Tensor, step: StepInputs) -> object:
        """Run the network on ``tokens [T]``; the result is not used."""
        ...


Pack = Callable[[LazyWeight, Tensor | None], None]
"""Packs a layer, given the importance ``[in]`` of its inputs (None if unknown)."""


def pack_calibrated(
    network: CalibrationNetwork, spec: KVCacheSpec | None, ops: Ops, config: HuggingFaceConfig, pack: Pack
) -> None:
    """Run the network on a fixed sequence of random tokens, and pack each layer after its use.

    Only lazily packed layers whose encoding needs calibration are packed. Experts are not packed here,
    because with so few tokens most experts receive none.

    Args:
        network: a network whose weights are `LazyWeight` objects.
        spec: the KV cache of the network; None if it has no KV cache.
        ops: the operations that run the network.
        config: the checkpoint's configuration, which contains the vocabulary size.
        pack: called with each layer.
    """
    tokens = np.random.default_rng(0).integers(0, max(config.vocabulary_size, 1), NUM_TOKENS)
    step = StepInputs(
        cast(Ops, _CalibratingOps(ops, pack)),
        torch.arange(NUM_TOKENS),
        torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        None if spec is None else _cache_inputs(spec, tokens),
        text_lengths=torch.full((NUM_TOKENS,), NUM_TOKENS) if network.is_length_dependent else None,
    )
    network(torch.from_numpy(tokens), step)


def _cache_inputs(spec: KVCacheSpec, tokens: npt.NDArray[np.int64]) -> KVCacheInputs:
    """Return the inputs of a new KV cache that holds these tokens."""
    num_blocks = [group.max_blocks(NUM_TOKENS, _BLOCK_SIZE) + 1 for group in spec.groups]
    kv = KVCacheManager(spec, num_blocks, _BLOCK_SIZE, enable_prefix_caching=False, num_states=1)
    context = TextContext(prompt=tokens.tolist(), max_length=NUM_TOKENS + 1, tokens=tokens)
    kv.claim(context)
    kv.reserve(context)
    return kv.inputs([context])


class _CalibratingOps:
    """Operations that pack each linear layer after its first use."""

    def __init__(self, ops: Ops, pack: Pack) -> None:
        self._ops = ops
        self._pack = pack

    def linear(self, x: Tensor, packed: PackedLinear, *, lora: LoRAInputs | None = None) -> Tensor:
        y = self._ops.linear(x, packed, lora=lora)
        self._pack_layer(x, packed)
        return y

    def activated_linear(
        self, x: Tensor, packed: PackedLinear, activation: Activation, *, lora: LoRAInputs | None = None
    ) -> Tensor:
        y = self._ops.activated_linear(x, packed, activation, lora=lora)
        self._pack_layer(x, packed)
        return y

    def _pack_layer(self, x: Tensor, packed: PackedLinear) -> None:
        if isinstance(packed.tensors, LazyWeight) and encoding_named(packed.encoding).needs_calibration:
            self._pack(packed.tensors, activation_statistics(x))

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)


def activation_statistics(x: Tensor) -> Tensor | None:
    """Return the importance ``[in]`` of each input of ``x [T, in]``.

    The importance is the mean square of the input divided by the mean square of all inputs, plus
    `_MIN_IMPORTANCE`. Returns None if the mean square of all inputs is 0 or not finite.
    """
    squares = x.float().square().mean(0)  # [in]
    mean = squares.mean()
    return squares / mean + _MIN_IMPORTANCE if mean > 0 and mean.isfinite() else None
