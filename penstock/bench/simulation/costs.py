"""The measured times that a simulation uses: the times of worker steps and of router messages."""

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
    """T, the number of rows of the ragged batch."""
    num_sequences: int
    """B, the number of contexts of the batch."""
    num_pairs: int
    """Number of pairs of a query and a visible key, summed over the contexts."""
    num_keys: int
    """Number of keys that the step reads, summed over the contexts."""

    @classmethod
    def from_contexts(cls, contexts: Iterable[InputContext]) -> StepShape:
        """Return the shape of the next forward of a batch."""
        shapes = [(context.active_length, context.start_idx) for context in contexts]
        num_pairs = sum(
            num_tokens * start + num_tokens * (num_tokens + 1) // 2 for num_tokens, start in shapes
        )
        num_keys = sum(num_tokens + start for num_tokens, start in shapes)
        return cls(sum(num_tokens for num_tokens, _ in shapes), len(shapes), num_pairs, num_keys)


class StepCostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A formula for the time of a step: ``table(T) + per_sequence * B + per_pair * pairs + per_key * keys``.

    The table is interpolated linearly. Outside its range it is extrapolated from the two nearest entries.
    """

    num_tokens: list[int]
    """T of each entry of the table, in ascending order; at least two entries."""
    seconds: list[float]
    """The seconds of each entry of the table."""
    per_sequence: float
    """Seconds per context, for the head, sampling and bookkeeping."""
    per_pair: float
    """Seconds per pair of a query and a key, for the arithmetic of attention."""
    per_key: float = 0.0
    """Seconds per key of a context, for reading the KV cache once for all rows of the context."""

    def __post_init__(self) -> None:
        if len(self.num_tokens) < 2 or len(self.num_tokens) != len(self.seconds):
            raise InputError(
                f"the table of step costs has {len(self.num_tokens)} sizes and {len(self.seconds)} times: it "
                "needs the same number of sizes and times, at least two"
            )
        if self.num_tokens != sorted(set(self.num_tokens)):
            raise InputError(f"the sizes of the table must ascend, were {self.num_tokens}")

    def step_seconds(self, shape: StepShape) -> float:
        """Return the seconds of a step."""
        index = min(max(bisect_left(self.num_tokens, shape.num_tokens), 1), len(self.num_tokens) - 1)
        low, high = self.num_tokens[index - 1], self.num_tokens[index]
        slope = (self.seconds[index] - self.seconds[index - 1]) / (high - low)
        table_seconds = self.seconds[index - 1] + slope * (shape.num_tokens - low)
        attention = self.per_pair * shape.num_pairs + self.per_key * shape.num_keys
        return table_seconds + self.per_sequence * shape.num_sequences + attention

    def scaled(self, speed: float) -> StepCostTable:
        """Return the costs of a worker that is ``speed`` times as fast."""
        return StepCostTable(
            self.num_tokens,
            [seconds / speed for seconds in self.seconds],
            self.per_sequence / speed,
            self.per_pair / speed,
            self.per_key / speed,
        )

    @classmethod
    def fitted(cls, steps: Sequence[tuple[StepShape, float]]) -> StepCostTable:
        """Return a formula with a small squared relative error over measured steps.

        The coefficients are at least 0 (`non_negative_least_squares`), and the seconds of the table do not
        decrease as the number of tokens increases.

        Args:
            steps: shape and seconds of each step. Each number of tokens becomes an entry of the table.

        Raises:
            InputError: all steps have the same number of tokens, or there are no steps.
        """
        token_counts = sorted({shape.num_tokens for shape, _ in steps})
        rows = np.zeros((len(steps), len(token_counts) + 3))  # [N, table entries + 3]
        for row, (shape, seconds) in zip(rows, steps, strict=True):
            row[token_counts.index(shape.num_tokens)] = 1 / seconds
            row[-3] = shape.num_sequences / seconds
            row[-2] = shape.num_pairs / seconds
            row[-1] = shape.num_keys / seconds
        coefficients = non_negative_least_squares(rows, np.ones(len(steps)))
        table = np.maximum.accumulate(coefficients[:-3])  # measurement noise could make the table decrease
        return cls(token_counts, table.tolist(), *map(float, coefficients[-3:]))


class RouterCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The CPU time of the router, in seconds.

    The choice of a worker takes ``per_decision + per_worker * workers + per_block * blocks``. The report of a
    step takes ``per_report + per_result * results``.
    """

    per_decision: float = 0.0
    per_worker: float = 0.0
    per_block: float = 0.0
    """Seconds per KV cache block of a prompt, mostly for hashing."""
    per_report: float = 0.0
    per_result: float = 0.0

    def decision_seconds(self, num_workers: int, num_blocks: int) -> float:
        """Return the seconds to choose a worker."""
        return self.per_decision + self.per_worker * num_workers + self.per_block * num_blocks

    def report_seconds(self, num_results: int) -> float:
        """Return the seconds to process the report of a step."""
        return self.per_report + self.per_result * num_results


class WorkerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a worker, from its memory plan."""

    max_length: int
    max_batch_size: int
    max_batch_input_tokens: int
    num_blocks: int
    block_size: int


class ClusterCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured times and limits of workers and router, which `write` stores as JSON."""

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
            InputError: the file cannot be read, or its content is invalid.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError, InputError) as error:
            raise InputError(f"{path} does not contain the costs of a cluster: {error}") from None

    def write(self, path: Path) -> None:
        """Write the costs to a file."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def non_negative_least_squares(
    matrix: np.ndarray[tuple[int, int], np.dtype[np.floating]],  # [N, M]
    target: np.ndarray[tuple[int], np.dtype[np.floating]],  # [N]
) -> np.ndarray[tuple[int], np.dtype[np.floating]]:
    """Return coefficients ``[M]``, at least 0, with a small norm of ``matrix @ coefficients - target``.

    The function solves the problem without the constraint. While the solution has negative coefficients, the
    function fixes the most negative coefficient at 0 and solves again.
    """
    free_columns = list(range(matrix.shape[1]))
    result = np.zeros(matrix.shape[1])
    while free_columns:
        solution, *_ = np.linalg.lstsq(matrix[:, free_columns], target, rcond=None)
        lowest_index = int(np.argmin(solution))
        if solution[lowest_index] >= 0:
            result[free_columns] = solution
            break
        del free_columns[lowest_index]
    return result
