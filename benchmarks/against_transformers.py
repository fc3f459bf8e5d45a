"""Compare Penstock with transformers on the same workloads. The two alternate (A B A B).

    python benchmarks/against_transformers.py                    # a 134 M Llama of random weights, bfloat16
    python benchmarks/against_transformers.py --shape l1b --pairs 3 --json out.json

Sampling is greedy, end of sequence is ignored, prompts are random and new in every run, and the prefix cache
is off. There are three workloads:

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

VOCABULARY = SHAPES["l110m"]["vocab_size"]


@dataclass(frozen=True)
class Work:
    """A workload: the number of prompts, their length, and the number of new tokens per prompt."""

    name: str
    prompts: int
    length: int
    new: int

    def tokens_per_second(self, first: float, whole: float) -> float:
        """Return the workload's figure from the seconds to the first token and the seconds of the run."""
        if self.name == "prefill":
            return self.length / first
        if self.name == "decode":
            return (self.new - 1) / (whole - first)
        return self.prompts * self.new / whole


WORKLOADS = [Work("decode", 1, 128, 64), Work("prefill", 1, 1024, 1), Work("batch", 32, 256, 64)]
Engine = Callable[[Work, int], float]


def main() -> None:
    """Run the workloads of the command line and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="l110m")
    parser.add_argument(
        "--works", nargs="+", choices=[work.name for work in WORKLOADS], default=["decode", "prefill"]
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(Path(folder), SHAPES[options.shape])
        ours, theirs = open_penstock(folder), open_transformers(folder)
        rows = [
            compare(work, ours, theirs, options.pairs) for work in WORKLOADS if work.name in options.works
        ]
    report = {"machine": machine(), "shape": options.shape, "pairs": options.pairs, "rows": rows}
    print(f"{report['machine']}\n{options.shape}, bfloat16, {options.pairs} pairs")
    for row in rows:
        figures = f"penstock {row['penstock']:7.1f} tokens/s, transformers {row['transformers']:7.1f}"
        spread = f"{row['lowest']:.2f} to {row['highest']:.2f}"
        print(f"{row['work']:8}{figures}, ratio {row['ratio']:.2f} ({spread})")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))


def compare(work: Work, ours: Engine, theirs: Engine, pairs: int) -> dict[str, Any]:
    """Run a workload on both engines alternately, after one warm-up run of each."""
    ours(work, 0), theirs(work, 0)
    found = [(ours(work, seed), theirs(work, seed)) for seed in range(1, pairs + 1)]
    ratios = [a / b for a, b in found]
    return {
        "work": work.name,
        "penstock": statistics.median(a for a, _ in found),
        "transformers": statistics.median(b for _, b in found),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "runs": found,
    }


def open_penstock(folder: str) -> Engine:
    llm = LLM(folder, enable_prefix_caching=False)

    def run(work: Work, seed: int) -> float:
        params = SamplingParams(max_new_tokens=work.new, ignore_eos=True, detokenize=False)
        first_params = SamplingParams(max_new_tokens=1, ignore_eos=True, detokenize=False)
        prompts = prompts_of(work, seed)
        first = timed(lambda: llm.generate(prompts, first_params, use_tqdm=False))
        whole = timed(lambda: llm.generate(prompts, params, use_tqdm=False)) if work.new > 1 else first
        return work.tokens_per_second(first, whole)

    return run


def open_transformers(folder: str) -> Engine:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def generate(prompts: list[list[int]], new: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                           do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip

    def run(work: Work, seed: int) -> float:
        prompts = prompts_of(work, seed)
        first = timed(lambda: generate(prompts, 1))
        whole = timed(lambda: generate(prompts, work.new)) if work.new > 1 else first
        return work.tokens_per_second(first, whole)

    return run


def prompts_of(work: Work, seed: int) -> list[list[int]]:
    tokens = np.random.default_rng(seed).integers(3, VOCABULARY, (work.prompts, work.length))
    return [[int(token) for token in row] for row in tokens]


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def machine() -> str:
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"kernels {cpu.isa()}, penstock {penstock.__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
