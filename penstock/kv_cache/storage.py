"""The tensors of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.driver import zeros
from penstock.dtype import DType
from penstock.errors import UnsupportedFeatureError
from penstock.host.memory import discard_pages
from penstock.kv_cache.spec import KVCacheSpec


class KVCacheStorage:
    """The keys and values of every block of every layer, initialised to zero.

    Kernels read and mask rows beyond the end of a sequence. With zeros these rows are never NaN.
    """

    def __init__(
        self, spec: KVCacheSpec, num_blocks: Sequence[int], block_size: int, device: torch.device
    ) -> None:
        self._spec = spec
        caches: list[Tensor] = []
        scales: list[Tensor | None] = []
        for index in spec.group_of_layer:
            group = spec.groups[index]
            rows = (2, num_blocks[index], group.kv_heads, block_size)  # [2, N, K, S]
            dtype = group.dtype.to_torch()
            caches.append(zeros((*rows, group.head_dim), dtype, device))
            is_int8 = group.dtype is DType.int8
            scales.append(zeros(rows, torch.float32, device) if is_int8 else None)
        self.caches = tuple(caches)
        """L tensors ``[2, N, K, S, D]``: keys, then values."""
        self.scales = tuple(scales)
        """L tensors ``[2, N, K, S]`` float32, for layers in int8; None for other layers."""
        self.on_copy: Callable[[int, int, int], None] = lambda group, source, target: None
        """Called before a block is copied, with the arguments of `copy_block`."""
        self.on_discard: Callable[[], None] = lambda: None
        """Called before the memory is returned by `discard`."""

    def discard(self) -> None:
        """Return the memory of all blocks to the system. They are zero again.

        The tensors keep their addresses, which compiled steps hold.

        Raises:
            UnsupportedFeatureError: the tensors are not in host memory.
        """
        self.on_discard()
        for tensor in (*self.caches, *(scale for scale in self.scales if scale is not None)):
            if tensor.device.type != "cpu":
                raise UnsupportedFeatureError(
                    "releasing only the KV cache", "a GPU cannot: release the weights too, with level 2"
                )
            discard_pages(tensor.data_ptr(), tensor.nbytes)

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy one block of all layers of a group."""
        self.on_copy(group, source, target)
        for layer in self._spec.groups[group].layers:
            for tensor in (self.caches[layer], self.scales[layer]):
                if tensor is not None:
                    tensor[:, target] = tensor[:, source]
