"""The tensors of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from penstock.driver import zeros
from penstock.errors import UnsupportedFeatureError
from penstock.host.memory import discard_pages, populate_pages
from penstock.kv_cache.spec import KVCacheSpec


class KVCacheStorage:
    """The keys and values of every block of every layer, initialized to zero.

    Kernels read keys and values beyond the end of a sequence and mask the results. These keys and values must
    not be NaN, so the tensors begin as zeros.

    Args:
        spec: the groups of layers.
        num_blocks: number of blocks of each group, including the null block.
        block_size: tokens of a block.
        device: the device of the tensors.
        fixed_scales: layer -> scales of keys and values ``[2, K]`` float32, for all layers of groups with
            fixed scales; None means 1 for all layers.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: Sequence[int],
        block_size: int,
        device: torch.device,
        fixed_scales: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._spec = spec
        caches: list[Tensor] = []
        scales: list[Tensor | None] = []
        for index in spec.group_of_layer:
            group = spec.groups[index]
            scales_shape = (2, num_blocks[index], group.kv_heads, block_size)  # [2, N, K, S]
            dtype = group.dtype.to_torch()
            caches.append(zeros((*scales_shape, group.head_dim), dtype, device))
            if group.has_fixed_scales:
                unit_scales = torch.ones(2, group.kv_heads)
                fixed_tensor = unit_scales if fixed_scales is None else fixed_scales[len(scales)]
                scales.append(fixed_tensor.to(device, torch.float32)[:, None, :, None].expand(scales_shape))
            else:
                scales.append(zeros(scales_shape, torch.float32, device) if group.is_quantized else None)
        self.caches = tuple(caches)
        """L tensors ``[2, N, K, S, D]``: keys, then values."""
        self.scales = tuple(scales)
        """L tensors ``[2, N, K, S]`` float32 for quantized layers; None for other layers. Fixed scales are
        read-only views of tensors ``[2, K]``."""
        self.on_copy: Callable[[int, int, int], None] = lambda group, source, target: None
        """Function that is called before a block is copied, with the arguments of `copy_block`."""
        self.on_discard: Callable[[], None] = lambda: None
        """Function that `discard` calls before it returns the memory."""
        self.on_populate: Callable[[int, int, int], None] = lambda layer, first_block, end_block: None
        """Function that is called before pages are allocated, with the arguments of `populate`."""

    def discard(self) -> None:
        """Return the memory of all blocks to the system. Afterwards all keys, values and row scales are zero.

        The tensors keep their addresses, because compiled steps contain the addresses.

        Raises:
            UnsupportedFeatureError: the tensors are not in host memory.
        """
        self.on_discard()
        for tensor in (tensor for layer in range(len(self.caches)) for tensor in self.block_tensors(layer)):
            if tensor.device.type != "cpu":
                raise UnsupportedFeatureError(
                    "releasing only the KV cache",
                    "not possible on a GPU: use level 2, which also releases the weights",
                )
            discard_pages(tensor.data_ptr(), tensor.nbytes)

    def populate(self, layer: int, first_block: int, end_block: int) -> bool:
        """Allocate the pages of the blocks ``first_block .. end_block - 1`` of a layer in host memory.

        Without this call, the system allocates a page during a step, on the first write to the page. The
        contents of the pages do not change.

        Returns:
            Whether the pages are allocated, see `populate_pages`.
        """
        self.on_populate(layer, first_block, end_block)
        parts = [part for tensor in self.block_tensors(layer) for part in tensor]  # keys, values
        block_ranges = [part[first_block:end_block] for part in parts]
        return all(populate_pages(blocks.data_ptr(), blocks.nbytes) for blocks in block_ranges)

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy one block of all layers of a group."""
        self.on_copy(group, source, target)
        for layer in self._spec.groups[group].layers:
            for tensor in self.block_tensors(layer):
                tensor[:, target] = tensor[:, source]

    def block_tensors(self, layer: int) -> tuple[Tensor, ...]:
        """Return the tensors ``[2, N, ...]`` that hold the content of a layer's blocks."""
        cache, scales = self.caches[layer], self.scales[layer]
        group = self._spec.groups[self._spec.group_of_layer[layer]]
        return (cache, scales) if scales is not None and group.has_row_scales else (cache,)
