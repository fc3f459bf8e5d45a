"""Compare the throughput of HTTP requests with `LLM.generate`. The variants alternate (A B C A B C).

    python benchmarks/serve_against_llm.py                # demo model: LLM, HTTP, streamed HTTP
    python benchmarks/serve_against_llm.py --shape l1b --pairs 3 --prompts 32 --new 32 --json out.json

32 requests run concurrently. Prompts are new random tokens, sampling is greedy, and end of sequence is
ignored. The server and its worker are two processes on this machine. The client runs in this process and uses
the same CPUs.

The ratio of a variant is its throughput divided by the throughput of `LLM` in the same round. The script also
prints the CPU time per token, which depends less on other processes than wall time. Figures are medians.
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "GOMP_SPINCOUNT", "100"
)  # the value of the server's workers; it must be set before torch is imported

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
from against_transformers import VOCAB_SIZE, describe_machine

from penstock import LLM, SamplingParams
from penstock.bench.http_client import HttpClient
from penstock.bench.load import Load, measure
from penstock.bench.prompts import RequestTemplate
from penstock.bench.random_weights import SHAPES, write_random_checkpoint

CONCURRENCY = 32


@dataclass(frozen=True)
class Run:
    """The result of one run of a variant."""

    seconds: float
    num_tokens: int
    cpu_seconds: list[float]
    """CPU seconds of this process, of the server, and of its worker."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of wall time."""
        return self.num_tokens / self.seconds

    @property
    def cpu_ms_per_token(self) -> list[float]:
        """CPU milliseconds per token of this process, of the server, and of its worker."""
        return [1000 * seconds / self.num_tokens for seconds in self.cpu_seconds]


def main() -> None:
    """Run the comparison and print a table."""
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
        model, vocab_size = "demo", 400
        if options.shape != "demo":
            write_random_checkpoint(Path(folder), SHAPES[options.shape])
            model, vocab_size = folder, VOCAB_SIZE
        rows = compare(options, model, vocab_size)
    report = {"machine": describe_machine(), "options": {**vars(options), "json": None}, "rows": rows}
    print(f"{report['machine']}\n{options.shape}, {options.prompts} prompts of {options.length}, "
          f"{options.new} new tokens each, {options.pairs} rounds")  # fmt: skip
    for row in rows:
        spread = f"{row['ratio']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f})"
        client, server_ms, worker = row["costs"]
        costs = f"{client:.3f} client, {server_ms:.3f} server, {worker:.3f} worker"
        print(f"{row['how']:10}{row['speed']:8.0f} tokens/s, ratio {spread}; CPU ms per token: {costs}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


def compare(options: argparse.Namespace, model: str, vocab_size: int) -> list[dict[str, Any]]:
    """Run rounds of all variants, after a warm-up round. Returns one row per variant."""
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
            inputs = prompts if options.endpoint == "completions" else [str(prompt) for prompt in prompts]
            bodies = [template.body(index, prompt) for index, prompt in enumerate(inputs)]
            result = loop.run_until_complete(
                measure(client, template.path, bodies, Load(concurrency=CONCURRENCY))
            )
            errors = {outcome.error for outcome in result.outcomes} - {None}
            assert not errors, errors
            return sum(outcome.completion_tokens for outcome in result.outcomes)

        variants: dict[str, Callable[[list[list[int]]], int]] = {
            "LLM": through_llm,
            "whole": lambda prompts: through_http(prompts, stream=False),
            "streamed": lambda prompts: through_http(prompts, stream=True),
        }
        pids = [os.getpid(), server_pid, *child_pids(server_pid)]
        rounds = []
        for number in range(options.pairs + 1):
            runs = {}
            for index, (name, variant) in enumerate(variants.items()):
                rng = np.random.default_rng(100 * number + index)
                prompts = rng.integers(3, vocab_size, (options.prompts, options.length)).tolist()
                runs[name] = measure_run(variant, prompts, pids)
            rounds.append(runs)
        client.close()
    return [report_row(name, rounds[1:]) for name in variants]


def report_row(name: str, rounds: list[dict[str, Run]]) -> dict[str, Any]:
    """Return the medians of one variant over all rounds."""
    ratios = [runs[name].tokens_per_second / runs["LLM"].tokens_per_second for runs in rounds]
    costs = zip(*(runs[name].cpu_ms_per_token for runs in rounds), strict=True)
    return {
        "how": name,
        "speed": statistics.median(runs[name].tokens_per_second for runs in rounds),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "costs": [statistics.median(cost) for cost in costs],
    }


def measure_run(variant: Callable[[list[list[int]]], int], prompts: list[list[int]], pids: list[int]) -> Run:
    """Run one variant and return its wall time and the CPU time of the processes ``pids``."""
    before, begin = [process_cpu_seconds(pid) for pid in pids], time.perf_counter()
    num_tokens = variant(prompts)
    seconds = time.perf_counter() - begin
    cpu_seconds = [process_cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True)]
    return Run(seconds, num_tokens, cpu_seconds)


def process_cpu_seconds(pid: int) -> float:
    """Return the user and system CPU time of a process since its start, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def child_pids(pid: int) -> list[int]:
    """Return the process ids of the children of a process. The server has one child, its worker."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def server(model: str) -> Iterator[tuple[str, int]]:
    """Start a server and yield its address and process id. Stops the server at the end."""
    command = [sys.executable, "-m", "penstock", "serve", "--model", model, "--served-model-name", "demo",
               "--port", "0", "--max-batch-size", str(CONCURRENCY), "--no-access-log"]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if match := re.search(r"serving .* at (http://\S+)", line):
                    break
            else:
                sys.exit("the server ended before it printed its address:\n" + "".join(lines))
            yield match[1], process.pid
        finally:
            process.terminate()
            process.communicate()


if __name__ == "__main__":
    main()
