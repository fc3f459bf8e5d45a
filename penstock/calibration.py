"""Weights of few bits, true where it counts: packed by what the inputs of their layers are worth.

An error of a weight reaches the output times its input, and in trained models some inputs are a hundred
times as large as others, always the same ones (Lin et al. 2023, arXiv:2306.00978). Which ones hardly
depends on the text: 16 random tokens tell as much as 1,500 of a model's own. So a load runs these through
the floats that it has mapped, and packs each layer as it has been used: every weight is read once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels import (
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
_LEAST = 1e-6
"""Of the mean importance: what no input falls below."""


class CalibrationNetwork(Protocol):
    """What is run: all of a model but its head."""

    @property
    def length_dependent(self) -> bool:
        """Whether keys depend on the length of the text."""
        ...

    def __call__(self, tokens: Tensor, step: StepInputs) -> object:
        """Run the network on ``tokens [T]``; the result is not used."""
        ...


Pack = Callable[[LazyWeight, Tensor | None], None]
"""Packs a layer by the importance of its inputs."""


def pack_calibrated(
    network: CalibrationNetwork, spec: KVCacheSpec | None, ops: Ops, config: HuggingFaceConfig, pack: Pack
) -> None:
    """Runs some random tokens, the same each time, and packs what they pass.

    Experts are not among it: of so few tokens most see none.

    Args:
        network: with weights that are `LazyWeight`.
        spec: of its KV cache; None for a network without one.
        ops: runs it.
        config: says how many tokens there are.
        pack: is given each layer.
    """
    tokens = np.random.default_rng(0).integers(0, max(config.vocabulary_size, 1), NUM_TOKENS)
    step = StepInputs(
        cast(Ops, _CalibratingOps(ops, pack)),
        torch.arange(NUM_TOKENS),
        torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        None if spec is None else _cache_inputs(spec, tokens),
        text_lengths=torch.full((NUM_TOKENS,), NUM_TOKENS) if network.length_dependent else None,
    )
    network(torch.from_numpy(tokens), step)


def _cache_inputs(spec: KVCacheSpec, tokens: npt.NDArray[np.int64]) -> KVCacheInputs:
    """Return the inputs of a new KV cache with room for these tokens."""
    num_blocks = [group.max_blocks(NUM_TOKENS, _BLOCK_SIZE) + 1 for group in spec.groups]
    kv = KVCacheManager(spec, num_blocks, _BLOCK_SIZE, enable_prefix_caching=False)
    context = TextContext(prompt=tokens.tolist(), max_length=NUM_TOKENS + 1, tokens=tokens)
    kv.claim(context)
    kv.reserve(context)
    return kv.inputs([context])


class _CalibratingOps:
    """A back end that packs a linear layer when it has been used."""

    def __init__(self, ops: Ops, pack: Pack) -> None:
        self._ops = ops
        self._pack = pack

    def linear(self, x: Tensor, packed: PackedLinear, *, lora: LoRAInputs | None = None) -> Tensor:
        y = self._ops.linear(x, packed, lora=lora)
        if isinstance(packed.tensors, LazyWeight) and encoding_named(packed.encoding).needs_calibration:
            self._pack(packed.tensors, activation_statistics(x))
        return y

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return cast(Callable[..., Any], getattr(self._ops, name))


def activation_statistics(x: Tensor) -> Tensor | None:
    """The mean square of each input of ``x [T, in]``, by their mean; None where it says nothing."""
    squares = x.float().square().mean(0)  # [in]
    mean = squares.mean()
    return squares / mean + _LEAST if mean > 0 and mean.isfinite() else None
