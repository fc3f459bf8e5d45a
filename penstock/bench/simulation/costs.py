"""Measured times that a simulation uses: steps of a worker, and messages of the router."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np

from penstock.errors import InputError
from penstock.pipelines.core import InputContext


class StepShape(NamedTuple):
    """The size of a step."""

    num_tokens: int
    """T, rows of the ragged batch."""
    num_sequences: int
    """B, contexts of the batch."""
    num_pairs: int
    """Pairs of a query and a key that it sees, summed over the contexts."""
    num_keys: int
    """Keys that the step reads, summed over the contexts."""

    @classmethod
    def of(cls, contexts: Iterable[InputContext]) -> StepShape:
        """Return the shape of the next forward of a batch."""
        shapes = [(context.active_length, context.start_idx) for context in contexts]
        pairs = sum(rows * start + rows * (rows + 1) // 2 for rows, start in shapes)
        keys = sum(rows + start for rows, start in shapes)
        return cls(sum(rows for rows, _ in shapes), len(shapes), pairs, keys)


class StepCostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of a step: ``table(T) + per_sequence * B + per_pair * pairs + per_key * keys``.

    The table is linear between two entries, and continues with the slope of its last two entries.
    """

    num_tokens: list[int]
    """The entries of the table, ascending, at least two."""
    seconds: list[float]
    """Seconds of each entry."""
    per_sequence: float
    """Seconds for each context: head, sampling, bookkeeping."""
    per_pair: float
    """Seconds for each pair of a query and a key: the arithmetic of attention."""
    per_key: float = 0.0
    """Seconds for each key of a context: attention reads it once, for all rows of the context."""

    def __post_init__(self) -> None:
        if len(self.num_tokens) < 2 or len(self.num_tokens) != len(self.seconds):
            raise InputError(
                f"the table of step costs has {len(self.num_tokens)} sizes and {len(self.seconds)} times: it "
                "needs at least two of each"
            )
        if self.num_tokens != sorted(set(self.num_tokens)):
            raise InputError(f"the sizes of the table must ascend, were {self.num_tokens}")

    def of(self, shape: StepShape) -> float:
        """Return the seconds of a step."""
        after = min(max(bisect_left(self.num_tokens, shape.num_tokens), 1), len(self.num_tokens) - 1)
        low, high = self.num_tokens[after - 1], self.num_tokens[after]
        slope = (self.seconds[after] - self.seconds[after - 1]) / (high - low)
        table = self.seconds[after - 1] + slope * (shape.num_tokens - low)
        attention = self.per_pair * shape.num_pairs + self.per_key * shape.num_keys
        return table + self.per_sequence * shape.num_sequences + attention

    def scaled(self, speed: float) -> StepCostTable:
        """Return the costs of a worker that is ``speed`` times as fast."""
        return StepCostTable(
            self.num_tokens,
            [one / speed for one in self.seconds],
            self.per_sequence / speed,
            self.per_pair / speed,
            self.per_key / speed,
        )

    @classmethod
    def fitted(cls, steps: Sequence[tuple[StepShape, float]]) -> StepCostTable:
        """Fit the formula to measured steps, with the smallest relative errors (non-negative least squares).

        Args:
            steps: shapes and seconds. Each number of tokens that occurs becomes an entry of the table.

        Raises:
            InputError: fewer than two numbers of tokens occur.
        """
        sizes = sorted({shape.num_tokens for shape, _ in steps})
        rows = np.zeros((len(steps), len(sizes) + 3))  # [N, entries and 3]
        for row, (shape, seconds) in zip(rows, steps, strict=True):
            row[sizes.index(shape.num_tokens)] = 1 / seconds
            row[-3] = shape.num_sequences / seconds
            row[-2] = shape.num_pairs / seconds
            row[-1] = shape.num_keys / seconds
        found = non_negative_least_squares(rows, np.ones(len(steps)))
        table = np.maximum.accumulate(found[:-3])  # more tokens never take less time
        return cls(sizes, table.tolist(), *map(float, found[-3:]))


class RouterCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The processor time of the router: ``per_decision + per_worker * workers + per_block * blocks`` for the
    choice of a worker, ``per_report + per_result * results`` for the report of a step."""

    per_decision: float = 0.0
    per_worker: float = 0.0
    per_block: float = 0.0
    """For each block of a prompt; most of it is hashing."""
    per_report: float = 0.0
    per_result: float = 0.0

    def of_decision(self, num_workers: int, num_blocks: int) -> float:
        """Return the seconds of a decision."""
        return self.per_decision + self.per_worker * num_workers + self.per_block * num_blocks

    def of_report(self, num_results: int) -> float:
        """Return the seconds of the report of a step."""
        return self.per_report + self.per_result * num_results


class WorkerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a worker, as its memory plan has them."""

    max_length: int
    max_batch_size: int
    max_batch_input_tokens: int
    num_blocks: int
    block_size: int


class ClusterCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured costs and limits of workers and router. Stored as JSON."""

    measured: Mapping[str, str]
    """Description of the measurement: model, machine, date."""
    limits: WorkerLimits
    step: StepCostTable
    router: RouterCosts
    message_seconds: float = 0.0002
    """Seconds that a message takes between router and worker."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the costs from a file.

        Raises:
            InputError: the file cannot be read or has other contents.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError, InputError) as error:
            raise InputError(f"{path} has no costs of a cluster: {error}") from None

    def write(self, path: Path) -> None:
        """Write the costs to a file."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def non_negative_least_squares(
    matrix: np.ndarray[tuple[int, int], np.dtype[np.floating]],  # [N, M]
    target: np.ndarray[tuple[int], np.dtype[np.floating]],  # [N]
) -> np.ndarray[tuple[int], np.dtype[np.floating]]:
    """Return ``[M]`` coefficients of at least 0 with the smallest squared error.

    Solves without constraint and removes the most negative coefficient, until none is negative.
    """
    used = list(range(matrix.shape[1]))
    result = np.zeros(matrix.shape[1])
    while used:
        found, *_ = np.linalg.lstsq(matrix[:, used], target, rcond=None)
        lowest = int(np.argmin(found))
        if found[lowest] >= 0:
            result[used] = found
            break
        del used[lowest]
    return result
