"""Compare the speed of Penstock and transformers on the same workloads. Runs alternate (A B A B).

    python benchmarks/against_transformers.py        # a Llama with 134 M random parameters in bfloat16
    python benchmarks/against_transformers.py --shape l1b --pairs 3 --json out.json

Sampling is greedy, end of sequence is ignored, prompts are random and new in every run, and Penstock's prefix
cache is off. The time to the first token is measured in a separate call that generates one token. There are
three workloads; decode and prefill run by default:

    decode     one prompt of 128 tokens, 64 new tokens: tokens/s after the first token
    prefill    one prompt of 1024 tokens: tokens/s
    batch      32 prompts of 256 tokens, 64 new tokens each: output tokens/s over the whole run

Figures are medians. Compare the ratios: absolute figures vary with the load of the machine, which should be
idle.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock
from penstock import LLM, SamplingParams
from penstock.bench.random_weights import SHAPES, write_random_checkpoint
from penstock.kernels import cpu

VOCAB_SIZE = SHAPES["l110m"]["vocab_size"]


@dataclass(frozen=True)
class Workload:
    """A workload: the number of prompts, their length, and the number of new tokens per prompt."""

    name: str
    num_prompts: int
    prompt_length: int
    num_new_tokens: int

    def tokens_per_second(self, one_token_seconds: float, total_seconds: float) -> float:
        """Return the tokens per second that the workload reports.

        Args:
            one_token_seconds: duration of a call that generates one token for each prompt.
            total_seconds: duration of a call that generates ``num_new_tokens`` tokens for each prompt.
        """
        if self.name == "prefill":
            return self.prompt_length / one_token_seconds
        if self.name == "decode":
            return (self.num_new_tokens - 1) / (total_seconds - one_token_seconds)
        return self.num_prompts * self.num_new_tokens / total_seconds


WORKLOADS = [
    Workload("decode", 1, 128, 64),
    Workload("prefill", 1, 1024, 1),
    Workload("batch", 32, 256, 64),
]
RunEngine = Callable[[Workload, int], float]
"""(workload, seed of the random prompts) -> tokens per second of one run."""


def main() -> None:
    """Run the workloads of the command line and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="l110m")
    parser.add_argument(
        "--works", nargs="+", choices=[item.name for item in WORKLOADS], default=["decode", "prefill"]
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(Path(folder), SHAPES[options.shape])
        ours, theirs = open_penstock(folder), open_transformers(folder)
        rows = [
            compare(workload, ours, theirs, options.pairs)
            for workload in WORKLOADS
            if workload.name in options.works
        ]
    report = {"machine": describe_machine(), "shape": options.shape, "pairs": options.pairs, "rows": rows}
    print(f"{report['machine']}\n{options.shape}, bfloat16, {options.pairs} pairs")
    for row in rows:
        figures = f"penstock {row['penstock']:7.1f} tokens/s, transformers {row['transformers']:7.1f}"
        spread = f"{row['lowest']:.2f} to {row['highest']:.2f}"
        print(f"{row['work']:8}{figures}, ratio {row['ratio']:.2f} ({spread})")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


def compare(workload: Workload, ours: RunEngine, theirs: RunEngine, num_pairs: int) -> dict[str, Any]:
    """Run a workload on both engines alternately, after one warm-up run of each.

    Returns the name of the workload, the median tokens per second of both engines, the median, lowest and
    highest ratio of Penstock's speed to the speed of transformers, and the speeds of all runs.
    """
    ours(workload, 0), theirs(workload, 0)
    speeds = [(ours(workload, seed), theirs(workload, seed)) for seed in range(1, num_pairs + 1)]
    ratios = [a / b for a, b in speeds]
    return {
        "work": workload.name,
        "penstock": statistics.median(a for a, _ in speeds),
        "transformers": statistics.median(b for _, b in speeds),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "runs": speeds,
    }


def open_penstock(folder: str) -> RunEngine:
    """Return a function that runs a workload with Penstock in bfloat16."""
    llm = LLM(folder, enable_prefix_caching=False)

    def run(workload: Workload, seed: int) -> float:
        params = SamplingParams(max_new_tokens=workload.num_new_tokens, ignore_eos=True, detokenize=False)
        first_params = SamplingParams(max_new_tokens=1, ignore_eos=True, detokenize=False)
        prompts = random_prompts(workload, seed)
        total = first = measure_seconds(lambda: llm.generate(prompts, first_params, use_tqdm=False))
        if workload.num_new_tokens > 1:
            total = measure_seconds(lambda: llm.generate(prompts, params, use_tqdm=False))
        return workload.tokens_per_second(first, total)

    return run


def open_transformers(folder: str) -> RunEngine:
    """Return a function that runs a workload with transformers in bfloat16."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(prompts: list[list[int]], num_new_tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new_tokens,
                min_new_tokens=num_new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )

    def run(workload: Workload, seed: int) -> float:
        prompts = random_prompts(workload, seed)
        total = first = measure_seconds(lambda: generate(prompts, 1))
        if workload.num_new_tokens > 1:
            total = measure_seconds(lambda: generate(prompts, workload.num_new_tokens))
        return workload.tokens_per_second(first, total)

    return run


def random_prompts(workload: Workload, seed: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    shape = (workload.num_prompts, workload.prompt_length)
    tokens = np.random.default_rng(seed).integers(3, VOCAB_SIZE, shape)
    return [[int(token) for token in row] for row in tokens]


def measure_seconds(action: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def describe_machine() -> str:
    """Return one line with the CPU architecture, cores, torch threads, CPU kernels and versions."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"kernels {cpu.isa()}, penstock {penstock.__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
