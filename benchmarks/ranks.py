"""Compare tensor parallelism with threads: two ranks with one thread each, and one process with two threads.

    python benchmarks/ranks.py --shape l1b --pairs 8
    python benchmarks/ranks.py --model DIR --what decode

Both configurations stay loaded during the measurement, in separate processes. Both configurations run the
same prompt alternately, so that a change of the machine's speed affects both. A pair is one run of each
configuration. The order changes with each pair. The ratio is the speed of the two ranks divided by the speed
of the one process.
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
from against_transformers import describe_machine

from penstock import LLM, SamplingParams
from penstock.bench.random_weights import SHAPES, write_random_checkpoint

NUM_RANKS = 2


def serve_runs(model: str, num_ranks: int, connection: Connection) -> None:
    """Load the model, then run each request that arrives on the connection until None arrives.

    Sends None when the model is loaded. A request is a tuple of the prompt and the number of new tokens. The
    answer is the seconds of the request.
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


class Configuration:
    """A model with ``num_ranks`` ranks in a separate process. All ranks together use `NUM_RANKS` threads."""

    def __init__(self, model: str, num_ranks: int) -> None:
        context = get_context("spawn")
        self._connection, child_connection = context.Pipe()
        self._process = context.Process(target=serve_runs, args=(model, num_ranks, child_connection))
        self._process.start()
        child_connection.close()
        self._connection.recv()

    def run(self, tokens: Sequence[int], num_new_tokens: int) -> float:
        """Run a request and return its seconds."""
        self._connection.send((list(tokens), num_new_tokens))
        seconds: float = self._connection.recv()
        return seconds

    def close(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join()


def measure(
    configurations: Sequence[Configuration], phase: str, prompt_length: int, num_steps: int, num_pairs: int
) -> None:
    """Run pairs of prefill or decode and print tokens per second and their ratio.

    Args:
        configurations: one process, then two ranks.
        phase: ``prefill`` or ``decode``.
        prompt_length: number of prompt tokens.
        num_steps: number of decode steps that are measured; not used for ``prefill``.
        num_pairs: number of pairs, without the warm-up.
    """
    rng = np.random.default_rng(0)
    rates: list[list[float]] = [[], []]
    for pair_number in range(-1, num_pairs):  # the first pair is a warm-up
        tokens = rng.integers(3, 30_000, prompt_length).tolist()
        order = (0, 1) if pair_number % 2 else (1, 0)
        for index in order:
            configuration = configurations[index]
            if phase == "prefill":
                rate = prompt_length / configuration.run(tokens, 1)
            else:
                prefill_seconds = configuration.run(tokens, 1)
                rate = num_steps / (configuration.run(tokens, 1 + num_steps) - prefill_seconds)
            if pair_number >= 0:
                rates[index].append(rate)
    single, ranks = rates
    ratios = sorted(b / a for a, b in zip(single, ranks, strict=True))
    for name, values in (("1 process of 2 threads", single), ("2 ranks of 1 thread", ranks)):
        print(
            f"{phase}, {name}: median {statistics.median(values):.1f} tokens/s "
            f"({min(values):.1f} to {max(values):.1f})"
        )
    print(
        f"{phase}, ratio of {num_pairs} pairs: median {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
        flush=True,
    )


def main() -> None:
    """Measure prefill, decode or both, as ``--what`` selects."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=("l110m", "l1b"), default="l1b")
    parser.add_argument("--model", help="measure this checkpoint instead of random weights")
    parser.add_argument("--what", nargs="+", choices=("prefill", "decode"), default=("prefill", "decode"))
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=24)
    options = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        model = options.model or str(write_random_checkpoint(Path(folder), SHAPES[options.shape]))
        configurations = [Configuration(model, num_ranks) for num_ranks in (1, NUM_RANKS)]
        for phase in options.what:
            length = options.length if phase == "prefill" else 16
            measure(configurations, phase, length, options.new_tokens, options.pairs)
        for configuration in configurations:
            configuration.close()


if __name__ == "__main__":
    main()
