"""Two ranks of one thread against one process of two threads: prefill and decode, in turn.

    python benchmarks/ranks.py --shape l1b --pairs 8
    python benchmarks/ranks.py --model DIR --what decode

Both configurations are loaded, each in its own processes. Then they run the same prompt in turn, so that a
change of the machine's speed concerns both. A pair is one run of each; the order changes with each pair. The
ratio is the speed of the ranks in units of that of the one process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from against_transformers import machine

from penstock import LLM, SamplingParams
from penstock.bench.random_weights import SHAPES, write_random_checkpoint

NUM_RANKS = 2


def serve_runs(model: str, num_ranks: int, connection: Connection) -> None:
    """Load the model, and run the prompts that arrive until the connection ends.

    Each message is a prompt and the number of new tokens; the answer is the seconds of all tokens.
    """
    with LLM(
        model,
        num_threads=NUM_RANKS,
        tensor_parallel_size=num_ranks,
        enable_prefix_caching=False,
        kv_cache_memory="128MiB",
    ) as llm:
        connection.send(None)
        while (message := connection.recv()) is not None:
            tokens, num_new_tokens = message
            params = SamplingParams(max_new_tokens=num_new_tokens, temperature=0.0, ignore_eos=True)
            begin = time.perf_counter()
            llm.generate([tokens], params, use_tqdm=False)
            connection.send(time.perf_counter() - begin)


class Side:
    """A configuration in a process of its own."""

    def __init__(self, model: str, num_ranks: int) -> None:
        context = get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve_runs, args=(model, num_ranks, other))
        self._process.start()
        other.close()
        self._connection.recv()

    def run(self, tokens: Sequence[int], num_new_tokens: int) -> float:
        """Return the seconds of a request."""
        self._connection.send((list(tokens), num_new_tokens))
        seconds: float = self._connection.recv()
        return seconds

    def close(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join()


def measure(sides: Sequence[Side], what: str, length: int, count: int, num_pairs: int) -> None:
    """Run pairs and print tokens per second and the ratio."""
    draws = np.random.default_rng(0)
    rates: list[list[float]] = [[], []]
    for number in range(-1, num_pairs):  # the first pair is a warm-up
        tokens = draws.integers(3, 30_000, length).tolist()
        order = (0, 1) if number % 2 else (1, 0)
        for index in order:
            if what == "prefill":
                rate = length / sides[index].run(tokens, 1)
            else:
                begun = sides[index].run(tokens, 1)
                rate = count / (sides[index].run(tokens, 1 + count) - begun)
            if number >= 0:
                rates[index].append(rate)
    one, ranks = rates
    ratios = sorted(b / a for a, b in zip(one, ranks, strict=True))
    for name, values in (("1 process of 2 threads", one), ("2 ranks of 1 thread", ranks)):
        print(
            f"{what}, {name}: median {statistics.median(values):.1f} tokens/s "
            f"({min(values):.1f} to {max(values):.1f})"
        )
    print(
        f"{what}, ratio of {num_pairs} pairs: median {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
    )


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="l1b")
    parser.add_argument("--model", help="measure this checkpoint in place of random weights")
    parser.add_argument("--what", nargs="+", choices=("prefill", "decode"), default=("prefill", "decode"))
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=24)
    given = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        model = given.model or str(write_random_checkpoint(Path(folder), SHAPES[given.shape]))
        sides = [Side(model, num_ranks) for num_ranks in (1, NUM_RANKS)]
        for what in given.what:
            length = given.length if what == "prefill" else 16
            measure(sides, what, length, given.new_tokens, given.pairs)
        for side in sides:
            side.close()


if __name__ == "__main__":
    main()
