"""Attention over the paged KV cache, and attention of encoders."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cuda.launch import divide_up, has_contiguous_rows, launch, num_processors, power_of_two
from penstock.kernels.cuda.programs import attention as programs
from penstock.kernels.cuda.programs.encoder_attention import attend_ragged
from penstock.kernels.cuda.programs.splits import merge_splits
from penstock.kernels.inputs import LayerKV, SequenceBlocks
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.spans import ImageSpans

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_KEYS_PER_SPLIT = 512
"""Number of keys per split in deterministic mode.

The number is fixed, because the order of additions depends on it.
"""
_MAX_SPLITS, _MIN_TILES = 64, 2
"""Outside deterministic mode: maximum number of splits, and approximate minimum of key tiles per split."""
_PROGRAMS_PER_PROCESSOR = 2
"""Number of programs per multiprocessor at which `CudaAttention` aims when it splits the keys."""
_SMALL_TILE, _LARGE_TILE = 16, 64
"""Minimum number of queries (rows times query heads) of a tile: for decode steps, and for long prompts."""
_RAGGED_ROWS = 32
"""Number of rows of a tile of `CudaAttention.encoder_attention`."""
_MAX_WIDE_TILE_DIM = 128
"""Largest head dimension for which a tile has 64 keys instead of 32. Float32 products always have 32 keys."""


class CudaAttention(ReferenceOps):
    """Attention in Triton, for caches of floats, int8 and 8-bit floats. Other inputs use `ReferenceOps`.

    The products multiply in the type of the queries and add in float32. Queries of 16 bits are widened to
    float32 if the cache is float32.
    """

    name = "cuda"
    is_deterministic = False
    """Whether results must be bit-equal in every batch, see `Ops.require_determinism`."""

    def attention(
        self,
        q: Tensor,
        kv: LayerKV,
        row_offsets: Tensor,
        lengths: Tensor,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        spans: ImageSpans | None = None,
    ) -> Tensor:
        cache, scales = kv.cache, kv.scales
        if (
            q.dtype not in FLOATS
            or not has_contiguous_rows(q, cache)
            or (cache.dtype not in FLOATS and scales is None)
        ):
            return super().attention(
                q, kv, row_offsets, lengths, scale=scale, soft_cap=soft_cap, sinks=sinks, spans=spans
            )
        cache, is_e4m3 = cache_for_programs(cache)
        num_rows, num_heads, head_dim = q.shape
        num_sequences, heads_per_kv_head = len(lengths), num_heads // cache.shape[2]
        multiplies_in_float32 = scales is None and cache.dtype == torch.float32 and q.dtype != torch.float32
        multiplies_in_float32 |= q.dtype == torch.float32
        tile_queries = self._choose_tile(num_rows, num_sequences, heads_per_kv_head, multiplies_in_float32)
        tile_rows = tile_queries // heads_per_kv_head
        out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
        grid = (num_rows // tile_rows + num_sequences, cache.shape[2])
        max_keys = kv.block_tables.shape[1] * cache.shape[3]
        constants = _tile_constants(tile_queries, heads_per_kv_head, head_dim, multiplies_in_float32)
        keys_per_split, num_splits = self._choose_splits(
            max_keys, constants["KEYS"], grid[0] * grid[1], q.device
        )
        # Other tensors stand for missing tensors. The program does not read them.
        scales_or_placeholder = cache if scales is None else scales
        span_bounds = row_offsets if spans is None else spans.bounds
        options = {
            **constants,
            "BLOCK": cache.shape[3],
            "SPLIT": keys_per_split,
            "HAS_WINDOW": kv.window is not None,
            "IS_CHUNKED": kv.is_chunked,
            "HAS_SPANS": spans is not None,
            "HAS_CAP": soft_cap is not None,
            "IS_SCALED": scales is not None,
            "IS_E4M3": is_e4m3,
        }
        window, cap = kv.window or 0, soft_cap or 1.0
        q_strides, kv_strides = q.stride()[:2], cache.stride()[1:4]
        scale_strides = (0, 0, 0) if scales is None else scales.stride()[1:4]
        key_scales, value_scales = scales_or_placeholder[0], scales_or_placeholder[1]
        sources = (
            q, cache[0], cache[1], key_scales, value_scales, kv.block_tables, row_offsets, lengths,
            span_bounds,
        )  # fmt: skip
        strides = (*kv_strides, *scale_strides, kv.block_tables.stride(0))
        sinks_or_placeholder = lengths if sinks is None else sinks
        if num_splits == 1:
            launch(
                programs.attend, grid, out, *sources, sinks_or_placeholder, num_sequences, window, scale,
                cap, *q_strides, *out.stride()[:2], *strides, HAS_SINKS=sinks is not None,
                is_dependent=True, **options,
            )  # fmt: skip
            return out
        width = options["WIDTH"]
        sums = torch.empty((num_splits, num_rows, num_heads, width), dtype=torch.float32, device=q.device)
        max_scores, sums_exp = torch.empty(
            (2, num_splits, num_rows, num_heads), dtype=torch.float32, device=q.device
        )
        launch(
            programs.attend_split, (*grid, num_splits), sums, max_scores, sums_exp, *sources, num_sequences,
            num_rows, num_heads, window, scale, cap, *q_strides, *strides, is_dependent=True, **options,
        )  # fmt: skip
        heads_per_program = min(power_of_two(num_heads), 4) if keys_per_split else 1
        launch(
            merge_splits, (num_rows, divide_up(num_heads, heads_per_program)), out, sums, max_scores,
            sums_exp, row_offsets, lengths, span_bounds, sinks_or_placeholder, num_sequences, num_rows,
            num_heads, window, *out.stride()[:2], DIM=head_dim, WIDTH=width, HEADS=heads_per_program,
            KEYS=constants["KEYS"], SPLITS=num_splits, SPLIT=keys_per_split, HAS_WINDOW=options["HAS_WINDOW"],
            IS_CHUNKED=kv.is_chunked, HAS_SPANS=options["HAS_SPANS"], HAS_SINKS=sinks is not None,
            is_dependent=True,
        )  # fmt: skip
        return out

    def _choose_splits(
        self, max_keys: int, keys_per_tile: int, num_tiles: int, device: torch.device
    ) -> tuple[int, int]:
        """Return the number of keys per split, and the number of splits.

        There are several splits only if there are too few tiles to fill the device. In deterministic mode, a
        split has `_KEYS_PER_SPLIT` keys. Otherwise, the number of splits is chosen to fill the device, and
        the returned number of keys is 0, with which the program divides the keys of each sequence evenly.

        Args:
            max_keys: upper bound of the number of keys of a sequence.
            keys_per_tile: number of keys of a tile.
            num_tiles: upper bound of the number of tiles of queries. Without splits, one program computes a
                tile.
            device: the device.
        """
        has_few_tiles = 4 * num_tiles < 3 * num_processors(device)
        if self.is_deterministic:
            return _KEYS_PER_SPLIT, divide_up(max_keys, _KEYS_PER_SPLIT) if has_few_tiles else 1
        if not has_few_tiles or num_tiles == 0 or max_keys <= keys_per_tile:
            return 0, 1
        target_splits = power_of_two(divide_up(_PROGRAMS_PER_PROCESSOR * num_processors(device), num_tiles))
        max_splits = power_of_two(divide_up(max_keys, _MIN_TILES * keys_per_tile))
        return 0, min(target_splits, _MAX_SPLITS, max_splits)

    def _choose_tile(
        self, num_rows: int, num_sequences: int, heads_per_kv_head: int, multiplies_in_float32: bool
    ) -> int:
        """Return the number of queries (rows times query heads) of a tile.

        In deterministic mode the number does not depend on the batch.
        """
        smallest_tile = power_of_two(heads_per_kv_head, _SMALL_TILE)
        if (
            self.is_deterministic
            or multiplies_in_float32
            or num_rows * heads_per_kv_head < _LARGE_TILE * num_sequences
        ):
            return smallest_tile
        return max(smallest_tile, _LARGE_TILE)

    def encoder_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row_offsets: Tensor,
        *,
        scale: float,
        window: int | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
        blocks: SequenceBlocks | None = None,
    ) -> Tensor:
        has_one_type = q.dtype == k.dtype == v.dtype
        if (
            q.dtype not in FLOATS
            or not has_one_type
            or not has_contiguous_rows(q, k, v)
            or not (bias is None or has_contiguous_rows(bias))
        ):
            return super().encoder_attention(
                q, k, v, row_offsets, scale=scale, window=window, is_causal=is_causal, bias=bias
            )
        num_rows, num_heads, head_dim = q.shape
        num_sequences = len(row_offsets) - 1
        out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
        launch(
            attend_ragged, (num_rows // _RAGGED_ROWS + num_sequences, num_heads), out, q, k, v, row_offsets,
            row_offsets if bias is None else bias, num_sequences, window or 0, scale, *q.stride()[:2],
            *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], 0 if bias is None else bias.stride(0),
            0 if bias is None else bias.shape[1] // 2, ROWS=_RAGGED_ROWS, GROUP=num_heads // k.shape[1],
            KEYS=64 if head_dim <= _MAX_WIDE_TILE_DIM and q.dtype != torch.float32 else 32, DIM=head_dim,
            WIDTH=power_of_two(head_dim, 16), HAS_WINDOW=window is not None, IS_CAUSAL=is_causal,
            HAS_BIAS=bias is not None,
        )  # fmt: skip
        return out


def cache_for_programs(cache: Tensor) -> tuple[Tensor, bool]:
    """Return the cache for a program, and whether it stores 8-bit floats.

    Programs read 8-bit floats as uint8, so such a cache is returned as a uint8 view.
    """
    is_e4m3 = cache.dtype == torch.float8_e4m3fn
    return cache.view(torch.uint8) if is_e4m3 else cache, is_e4m3


def _tile_constants(
    tile_queries: int, heads_per_kv_head: int, head_dim: int, multiplies_in_float32: bool
) -> dict[str, int]:
    """Return the program constants that depend on the tiles of queries and keys, and the number of warps."""
    return {
        "ROWS": tile_queries // heads_per_kv_head,
        "GROUP": heads_per_kv_head,
        "M": tile_queries,
        "KEYS": 64 if head_dim <= _MAX_WIDE_TILE_DIM and not multiplies_in_float32 else 32,
        "DIM": head_dim,
        "WIDTH": power_of_two(head_dim, 16),
        "TO_FLOAT32": multiplies_in_float32,
        "num_warps": 4 if tile_queries <= _LARGE_TILE else 8,
    }
