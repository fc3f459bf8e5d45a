"""What ``deterministic=True`` costs: the same work with and without, in turn (A B A B), medians and ratios.

    python benchmarks/determinism.py                    # a 134 M Llama of random weights, both encodings
    python benchmarks/determinism.py --shape l1b --encodings bfloat16 --works prefill --pairs 3

The works are those of against_transformers.py. Times are the CPU time of all threads, which other processes
on the machine disturb little; the ratio is that with the flag to that without.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from against_transformers import WORKS, Work, machine, prompts_of

from penstock import LLM, SamplingParams
from penstock.benchmarking.random_weights import SHAPES, write_random_checkpoint


def main() -> None:
    """Runs what the command line asks for and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [work.name for work in WORKS]
    parser.add_argument("--shape", choices=SHAPES, default="l110m")
    parser.add_argument("--encodings", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--works", nargs="+", choices=names, default=names)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    print(f"{machine()}\n{options.shape}, {options.pairs} pairs, CPU seconds")
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(Path(folder), SHAPES[options.shape])
        for encoding in options.encodings:
            without, flagged = open_model(folder, encoding, False), open_model(folder, encoding, True)
            for work in WORKS:
                if work.name in options.works:
                    compare(f"{encoding} {work.name}", work, without, flagged, options.pairs)
            without.close(), flagged.close()


def open_model(folder: str, encoding: str, deterministic: bool) -> LLM:
    return LLM(
        folder,
        quantization_encoding=encoding,
        deterministic=deterministic,
        enable_prefix_caching=False,
        kv_cache_memory=1 << 30,
    )


def compare(title: str, work: Work, without: LLM, flagged: LLM, pairs: int) -> None:
    """One work on both in turn, after a warm-up of each."""
    seconds_of(without, work, 0), seconds_of(flagged, work, 0)
    found = [
        (seconds_of(without, work, seed), seconds_of(flagged, work, seed)) for seed in range(1, pairs + 1)
    ]
    ratios = [b / a for a, b in found]
    without_seconds, flagged_seconds = (statistics.median(side) for side in zip(*found, strict=True))
    print(
        f"{title:18} without {without_seconds:7.3f} s, deterministic {flagged_seconds:7.3f} s, "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def seconds_of(llm: LLM, work: Work, seed: int) -> float:
    """CPU seconds of the work; of decoding alone, the prompt's taken off."""
    prompts = prompts_of(work, seed)
    whole = cpu_seconds(llm, prompts, work.new)
    return whole - cpu_seconds(llm, prompts, 1) if work.name == "decode" else whole


def cpu_seconds(llm: LLM, prompts: list[list[int]], new: int) -> float:
    params = SamplingParams(max_new_tokens=new, ignore_eos=True, detokenize=False)
    start = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - start


if __name__ == "__main__":
    main()
