"""Compare HTTP requests with calls of `LLM` on the same work. The variants alternate (A B C A B C).

    python benchmarks/serve_against_llm.py                # the embedded model, streamed and not streamed
    python benchmarks/serve_against_llm.py --shape l1b --pairs 3 --prompts 32 --new 32 --json out.json

32 requests run concurrently. Prompts are new random tokens, sampling is greedy, and end of sequence is
ignored. The server and its worker are two processes on this machine. The client runs in this process and also
uses CPU time.

A ratio is the throughput through HTTP divided by the throughput of `LLM` in the same round. The CPU time per
token is printed too: it is more reliable than wall time if other processes load the machine. Figures are
medians.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "100")  # as in the server's worker; torch reads it at import

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from against_transformers import VOCABULARY, machine

from penstock import LLM, SamplingParams
from penstock.bench.http_client import HttpClient
from penstock.bench.load import Load, measure
from penstock.bench.prompts import RequestTemplate
from penstock.bench.random_weights import SHAPES, write_random_checkpoint

CONCURRENCY = 32


@dataclass(frozen=True)
class Run:
    """One run of one variant."""

    seconds: float
    tokens: int
    processor_seconds: list[float]
    """CPU seconds of this process, of the server and of its worker."""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def costs(self) -> list[float]:
        """CPU milliseconds per token of each process."""
        return [1000 * seconds / self.tokens for seconds in self.processor_seconds]


def main() -> None:
    """Run the comparison of the command line and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=["demo", *SHAPES], default="demo")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, vocabulary = "demo", 400
        if options.shape != "demo":
            write_random_checkpoint(Path(folder), SHAPES[options.shape])
            model, vocabulary = folder, VOCABULARY
        rows = compare(options, model, vocabulary)
    report = {"machine": machine(), "options": {**vars(options), "json": None}, "rows": rows}
    print(f"{report['machine']}\n{options.shape}, {options.prompts} prompts of {options.length}, "
          f"{options.new} new tokens each, {options.pairs} rounds")  # fmt: skip
    for row in rows:
        spread = f"{row['ratio']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f})"
        client, *rest = row["costs"]
        shares = f"{client:.3f} client, {rest[0]:.3f} server, {rest[1]:.3f} worker"
        print(f"{row['how']:10}{row['speed']:8.0f} tokens/s, ratio {spread}; CPU ms per token: {shares}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


def compare(options: argparse.Namespace, model: str, vocabulary: int) -> list[dict[str, Any]]:
    """Run all variants in turn. The first round is a warm-up and does not count."""
    llm = LLM(model, max_batch_size=CONCURRENCY)
    with server(model) as (url, server_pid):
        client = HttpClient(url)
        loop = asyncio.new_event_loop()

        def through_llm(prompts: list[list[int]]) -> int:
            params = SamplingParams(max_new_tokens=options.new, temperature=0.0, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return sum(len(output.token_ids) for output in outputs)

        def through_http(prompts: list[list[int]], *, stream: bool) -> int:
            template = RequestTemplate(
                endpoint=options.endpoint, model="demo", output_length=options.new, stream=stream
            )
            given = prompts if options.endpoint == "completions" else [f"{one}" for one in prompts]
            bodies = [template.body(index, prompt) for index, prompt in enumerate(given)]
            found = loop.run_until_complete(
                measure(client, template.path, bodies, Load(concurrency=CONCURRENCY))
            )
            errors = {one.error for one in found.outcomes} - {None}
            assert not errors, errors
            return sum(one.completion_tokens for one in found.outcomes)

        variants: dict[str, Callable[[list[list[int]]], int]] = {
            "LLM": through_llm,
            "whole": lambda prompts: through_http(prompts, stream=False),
            "streamed": lambda prompts: through_http(prompts, stream=True),
        }
        pids = [os.getpid(), server_pid, *children_of(server_pid)]
        rounds = []
        for number in range(options.pairs + 1):
            turn = {}
            for place, (name, variant) in enumerate(variants.items()):
                draw = np.random.default_rng(100 * number + place)
                prompts = draw.integers(3, vocabulary, (options.prompts, options.length)).tolist()
                turn[name] = timed(variant, prompts, pids)
            rounds.append(turn)
        client.close()
    return [row_of(name, rounds[1:]) for name in variants]


def row_of(name: str, rounds: list[dict[str, Run]]) -> dict[str, Any]:
    """Return the figures of one variant."""
    ratios = [turn[name].speed / turn["LLM"].speed for turn in rounds]
    return {
        "how": name,
        "speed": statistics.median(turn[name].speed for turn in rounds),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "costs": [
            statistics.median(costs) for costs in zip(*(turn[name].costs for turn in rounds), strict=True)
        ],
    }


def timed(variant: Callable[[list[list[int]]], int], prompts: list[list[int]], pids: list[int]) -> Run:
    """Run one variant. Measures wall time and the CPU time of the processes."""
    before, start = [processor_seconds(pid) for pid in pids], time.perf_counter()
    tokens = variant(prompts)
    seconds = time.perf_counter() - start
    spent = [processor_seconds(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    return Run(seconds, tokens, spent)


def processor_seconds(pid: int) -> float:
    """Return the user and system time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process. The server has one child, its worker."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def server(model: str) -> Iterator[tuple[str, int]]:
    """Run a server in a separate process. Yields its address and process id."""
    command = [sys.executable, "-m", "penstock", "serve", "--model", model, "--served-model-name", "demo",
               "--port", "0", "--max-batch-size", str(CONCURRENCY), "--no-access-log"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            printed = []
            for line in process.stderr:
                printed.append(line)
                if found := re.search(r"serving .* at (http://\S+)", line):
                    break
            else:
                sys.exit("the server did not start:\n" + "".join(printed))
            yield found[1], process.pid
        finally:
            process.terminate()
            process.communicate()


if __name__ == "__main__":
    main()
