"""Compare decoding without and with n-gram speculation. The methods alternate (A B C A B C).

    python benchmarks/speculation.py                       # a Llama with 134 M random parameters, bfloat16
    python benchmarks/speculation.py --rounds 3 --batch 1 8 --json out.json

A model with random weights does not generate text that repeats its prompt. Therefore the benchmark forces an
answer: after each forward, it raises the logit of the answer's next token above all others. With forcing,
each call of the model runs only one decode step. Forward, sampling and bookkeeping run as usual. Workloads:

    edit       prompt: a source file of this package; answer: the same file with one class renamed
    summary    prompt: the start of a page of the documentation; answer: every third sentence of it
    unrelated  prompt: the same start of a page; answer: another page. This workload measures the cost of
               drafting if few n-grams match

Methods: ``plain`` without speculation, ``adaptive`` (``--speculative-method ngram``) and ``fixed`` (always 8
draft tokens, ``--no-adaptive-speculation``). Times cover the whole request, including prefill. Speeds and
ratios are medians; acceptance rate and tokens per verified step (a step with at least one draft token) are of
the last round. Compare the ratios, because absolute times vary with the load of the machine, which should be
idle.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from against_transformers import describe_machine, measure_seconds

from penstock import LLM, SamplingParams
from penstock.bench.random_weights import SHAPES, write_random_checkpoint
from penstock.pipelines import TextTokenizer
from penstock.pipelines.speculative import (
    AdaptiveDraftLength,
    FixedDraftLength,
    NGramProposer,
    SpeculationStats,
)
from penstock.weights.hub import resolve_checkpoint

ROOT = Path(__file__).resolve().parents[1]
MAX_PROMPT_LENGTH, MAX_ANSWER_LENGTH = 800, 400
METHODS = ("plain", "adaptive", "fixed")


def main() -> None:
    """Measure the workloads that the command line selects. Prints each row when it is complete."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="l110m")
    parser.add_argument("--works", nargs="+", choices=list(texts()), default=list(texts()))
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--new", type=int, default=200, help="maximum number of answer tokens")
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds, each with one run of every method"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(Path(folder), SHAPES[options.shape])
        llm = LLM(folder, enable_prefix_caching=False, speculative_method="ngram")
        report: dict[str, Any] = {
            "machine": describe_machine(),
            "shape": options.shape,
            "rounds": options.rounds,
            "rows": [],
        }
        print(f"{report['machine']}\n{options.shape}, bfloat16, {options.rounds} rounds", flush=True)
        for work in options.works:
            for batch in options.batch:
                row = compare(llm, work, batch, options.new, options.rounds)
                report["rows"].append(row)
                print(row_line(row), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(report, indent=2))


def row_line(row: dict[str, Any]) -> str:
    """Return the printed line of a row."""
    line = f"{row['work']:8} batch {row['batch']:2}  plain {row['plain']:6.1f} tokens/s"
    for method in METHODS[1:]:
        figures = row[method]
        line += (
            f"   {method} x{figures['ratio']:.2f} ({figures['lowest']:.2f} to {figures['highest']:.2f}), "
            f"{figures['acceptance_rate']:.0%} accepted, "
            f"{figures['mean_tokens']:.1f} tokens per verified step"
        )
    return line


def compare(llm: LLM, workload: str, batch: int, num_new_tokens: int, num_rounds: int) -> dict[str, Any]:
    """Run a workload with all methods alternately, after one warm-up run each. Returns the row to print."""
    prompt, answer = prompt_and_answer(workload)
    answer = answer[:num_new_tokens]
    run = forced_runs(llm, prompt, answer, batch)
    for method in METHODS:
        run(method)
    rounds = [{method: run(method) for method in METHODS} for _ in range(num_rounds)]
    row: dict[str, Any] = {"work": workload, "batch": batch, "prompt": len(prompt), "answer": len(answer)}
    row["plain"] = statistics.median(batch * len(answer) / runs["plain"][0] for runs in rounds)
    for method in METHODS[1:]:
        ratios = [runs["plain"][0] / runs[method][0] for runs in rounds]
        stats = rounds[-1][method][1]
        row[method] = {
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "acceptance_rate": stats.acceptance_rate,
            "mean_tokens": stats.mean_tokens,
        }
    return row


def forced_runs(
    llm: LLM, prompt: list[int], answer: list[int], batch: int
) -> Callable[[str], tuple[float, SpeculationStats]]:
    """Return a function that generates the answer for ``batch`` copies of the prompt with a method.

    The function returns the seconds of the run and its speculation statistics.
    """
    pipeline, model = llm.pipeline, llm.pipeline.model
    original_execute = type(model).execute
    text = torch.tensor([*prompt, *answer, 0])
    params = SamplingParams(max_new_tokens=len(answer), ignore_eos=True, detokenize=False)

    def execute_with_forced_logits(inputs: Any) -> Any:
        outputs = original_execute(model, inputs)
        next_positions = (inputs.positions[inputs.logit_rows] + 1).clamp(max=len(text) - 1)
        logits = outputs.logits.scatter(1, text[next_positions][:, None], 1e4)
        has_next_token_logits = outputs.next_token_logits is not None
        return replace(outputs, logits=logits, next_token_logits=logits if has_next_token_logits else None)

    def run(method: str) -> tuple[float, SpeculationStats]:
        policies = {"plain": None, "adaptive": AdaptiveDraftLength(8), "fixed": FixedDraftLength(8)}
        pipeline.proposer = None if method == "plain" else NGramProposer()
        pipeline.draft_lengths = policies[method]
        pipeline.speculation_stats = SpeculationStats()
        outputs: list[Any] = []
        seconds = measure_seconds(
            lambda: outputs.extend(llm.generate([prompt] * batch, params, use_tqdm=False))
        )
        assert all(output.token_ids == answer for output in outputs), (
            "the model did not generate the forced answer"
        )
        return seconds, pipeline.speculation_stats

    model.execute = execute_with_forced_logits  # type: ignore[method-assign]
    # Disable several decode steps in one call, because they sample from the logits of the model itself.
    model.execute_steps = lambda *_: None  # type: ignore[method-assign]
    return run


def texts() -> dict[str, tuple[str, str]]:
    """Return the prompt and the answer of each workload, as texts."""
    code = (ROOT / "penstock" / "dtype.py").read_text()
    page, other_page = (
        (ROOT / "docs" / name).read_text() for name in ("architecture.md", "compatibility.md")
    )
    sentences = re.split(r"(?<=[.:])\s+", page[:1500])
    return {
        "edit": (
            code + "\n# The same with DType renamed to ElementType:\n",
            code.replace("DType", "ElementType"),
        ),
        "summary": (page[:1500] + "\n\nIn short:\n\n", " ".join(sentences[::3])),
        "unrelated": (page[:1500], other_page),
    }


def prompt_and_answer(workload: str) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt and of the answer of a workload."""
    tokenizer = TextTokenizer(resolve_checkpoint("demo", "main"))
    tokenizer.max_length = 10**6
    prompt, answer = (tokenizer.encode_text(text).tolist() for text in texts()[workload])
    prompt = prompt[:MAX_PROMPT_LENGTH] if workload == "edit" else prompt[-MAX_PROMPT_LENGTH:]
    return prompt, answer[:MAX_ANSWER_LENGTH]


if __name__ == "__main__":
    main()
