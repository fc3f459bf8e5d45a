"""`BlockTables`: the block table of each slot, for each group of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.kv_cache.block_pool import NULL_BLOCK, BlockPool


class BlockTables:
    """The block tables ``[groups, slots, M]``, where M is the number of entries of each table.

    Unused entries are `NULL_BLOCK`.
    """

    def __init__(self, num_groups: int) -> None:
        self.values: npt.NDArray[np.int32] = np.full((num_groups, 8, 8), NULL_BLOCK, np.int32)

    def row(self, group: int, slot: int) -> npt.NDArray[np.int32]:  # [M]
        """Return the block table of a slot in a group, as a view. A later `grow` can invalidate the view."""
        row: npt.NDArray[np.int32] = self.values[group, slot]
        return row

    def grow(self, *, num_slots: int = 0, length: int = 0) -> None:
        """Make space for at least ``num_slots`` slots and for tables of at least ``length`` blocks."""
        for axis, size in ((1, num_slots), (2, length)):
            if size > self.values.shape[axis]:
                self._grow_axis(axis, size)

    def check_integrity(self, group: int, pool: BlockPool, ranges: Mapping[int, range]) -> None:
        """Raise an AssertionError unless the tables of a group are consistent with its pool.

        Args:
            group: the index of the group.
            pool: the blocks of the group.
            ranges: slot -> the entries of its table that must be blocks. The other entries are null blocks.
        """
        pool.check_integrity()
        num_tables = np.zeros(pool.num_blocks + 1, np.int64)
        for slot, entries in ranges.items():
            row = self.row(group, slot)
            assert np.flatnonzero(row).tolist() == list(entries), (
                f"group {group}: table {row.tolist()} of slot {slot} must have blocks at {entries}"
            )
            num_tables += np.bincount(row[entries.start : entries.stop], minlength=len(num_tables))
        references = pool.reference_counts()
        wrong_blocks = np.flatnonzero(num_tables != references).tolist()
        assert not wrong_blocks, (
            f"group {group}: block {(block := wrong_blocks[0])} has {references[block]} references "
            f"and is in {num_tables[block]} tables"
        )

    def batch_tables(
        self,
        slots: Sequence[int],  # [B]
        num_columns: int,
        end_positions: npt.NDArray[np.int64],  # [B]
        token_counts: Sequence[int],  # [B]
        block_size: int,
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """Return the block tables ``[B, num_columns]`` and slot mapping ``[T]`` of a batch, for each group.

        Args:
            slots: the slot of each sequence.
            num_columns: the number of entries of each block table to return.
            end_positions: the position after the last token of each sequence in the step.
            token_counts: the number of tokens of each sequence in the step.
            block_size: S, the tokens of a block. An entry of the slot mapping is ``block * S + offset``, with
                the token's offset in its block.
        """
        rows, positions = np.arange(len(slots)), end_positions - 1  # correct if each sequence has one token
        if sum(token_counts) > len(slots):
            rows = np.repeat(rows, token_counts)  # [T]
            positions = np.arange(len(rows)) + (end_positions - np.cumsum(token_counts))[rows]  # [T]
        columns, offsets = np.divmod(positions, block_size)
        tables = [table[slots, :num_columns] for table in self.values]  # [B, num_columns], copies
        return [(table, table[rows, columns].astype(np.int64) * block_size + offsets) for table in tables]

    def _grow_axis(self, axis: int, min_size: int) -> None:
        shape = list(self.values.shape)
        shape[axis] = max(min_size, 2 * shape[axis])
        grown_values = np.full(shape, NULL_BLOCK, np.int32)
        grown_values[:, : self.values.shape[1], : self.values.shape[2]] = self.values
        self.values = grown_values
