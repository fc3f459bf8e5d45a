"""Measure perplexity, decode speed and prefill speed of weight encodings. Prints one row per encoding.

    python benchmarks/encodings.py                                    # all encodings: demo model, shape l1b
    python benchmarks/encodings.py --encodings nf4 fp4 fp8 --pairs 7 --json rows.json
    python benchmarks/encodings.py --only quality --model /models/small --text-file ordinary.txt
    PENSTOCK_ISA=avx2 python benchmarks/encodings.py --only speed --shape l110m

Quality is measured on a trained model. The texts are sampled from the model in float32; ``--text-file`` adds
the text of a file. Speed is measured on random weights. Runs alternate between the encoding and a baseline.
The baseline is int4, or int8 if the encoding has more than 5 bits per weight (scales not counted). Both
models stay loaded.

Some encodings exist only in checkpoint formats. For these encodings, `penstock.bench.stored_encodings` rounds
the weights to the nearest value. A calibrated checkpoint has the same speed and a different perplexity.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from against_transformers import describe_machine
from quality import TEXT_LENGTH, open_model, read_texts, start_token

from penstock.bench.quality import compare_all, sample_texts
from penstock.bench.random_weights import shape_config, write_random_checkpoint
from penstock.bench.stored_encodings import StoredFormat, write_stored
from penstock.bench.workloads import Bench, Sizes
from penstock.config import PipelineConfig
from penstock.kernels import ENCODINGS
from penstock.weights.formats import FORMATS
from penstock.weights.hub import resolve_checkpoint

SPEED_WORKLOADS = ("decode", "prefill")
REFERENCE = "bfloat16"
MAX_BITS_OF_INT4_BASELINE = 5


@dataclass
class Row:
    """The figures of one encoding."""

    encoding: str
    bits: float
    """Average bits per weight, including scales."""
    quality: dict[str, dict[str, float]] = field(default_factory=dict)
    """Name of a text -> the figures ``perplexity``, ``relative`` (perplexity divided by the perplexity in
    bfloat16), ``divergence`` (KL from float32) and ``agreement`` (share of equal top-1 tokens)."""
    baseline: str = ""
    """The encoding that the speed is compared with."""
    speeds: dict[str, list[float]] = field(default_factory=dict)
    """Workload -> tokens/s of the encoding, for each pair of runs."""
    ratios: dict[str, list[float]] = field(default_factory=dict)
    """Workload -> speed divided by the speed of the baseline, for each pair of runs."""


def main() -> None:
    """Measure the encodings that the command line selects, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encodings", nargs="+", choices=list(ENCODINGS), default=list(ENCODINGS))
    parser.add_argument("--only", choices=["quality", "speed"])
    parser.add_argument("--model", default="demo", help="trained model for the quality measurement")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--text-file", type=Path, help="also measure up to --tokens of this UTF-8 file")
    parser.add_argument("--shape", default="l1b", help="model shape for the speed measurement")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=1024, help="prompt length of the prefill workload")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe_machine())
    rows = [Row(name, ENCODINGS[name].bits_per_weight) for name in options.encodings]
    rows = [row for row in rows if ENCODINGS[row.encoding].on_device("cpu") == row.encoding]
    with FORMATS.extended(StoredFormat()), tempfile.TemporaryDirectory() as folder:
        if options.only != "speed":
            measure_quality(
                rows, options.model, Path(folder), options.tokens, options.text_file, options.threads
            )
        if options.only != "quality":
            sizes = Sizes(prefill_length=options.prefill, new_tokens=options.new_tokens)
            measure_speed(rows, options.shape, Path(folder), sizes, options.pairs, options.threads)
    print_table(rows)
    if options.json:
        content = {"machine": describe_machine(), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")


def is_selectable(encoding: str) -> bool:
    """Return whether ``quantization_encoding`` accepts the encoding for a float checkpoint."""
    return not ENCODINGS[encoding].is_internal


# -- Quality --------------------------------------------------------------------------------------------


def measure_quality(
    rows: Sequence[Row],
    model: str,
    folder: Path,
    num_tokens: int,
    text_file: Path | None,
    threads: int | None,
) -> None:
    """Store the quality of each encoding in its row.

    The models of all encodings are loaded at the same time.
    """
    checkpoint = resolve_checkpoint(model, "main", None)
    with ExitStack() as stack:
        float32_llm = stack.enter_context(open_model(model, "float32", threads=threads, devices="cpu"))
        length = min(TEXT_LENGTH, float32_llm.pipeline.memory_plan.max_length)
        count = -(-num_tokens // length)
        texts = {"sampled": sample_texts(float32_llm, start_token(float32_llm), count=count, length=length)}
        if text_file is not None:
            texts[text_file.name] = read_texts(float32_llm, text_file, num_tokens, length)
        models = {
            "float32": float32_llm,
            REFERENCE: stack.enter_context(open_model(model, REFERENCE, threads=threads, devices="cpu")),
        }
        for row in rows:
            if row.encoding in models:
                continue
            if is_selectable(row.encoding):
                llm = open_model(model, row.encoding, threads=threads, devices="cpu")
            else:
                stored_folder = write_stored(checkpoint, folder / "quality" / row.encoding, row.encoding)
                llm = open_model(str(stored_folder), None, threads=threads, devices="cpu")
            models[row.encoding] = stack.enter_context(llm)
        for name, token_lists in texts.items():
            comparisons = compare_all(models, token_lists, ("float32",))
            qualities = {encoding: by_reference["float32"] for encoding, by_reference in comparisons.items()}
            reference_perplexity = qualities[REFERENCE].perplexity
            for row in rows:
                quality = qualities[row.encoding]
                row.quality[name] = {
                    "perplexity": quality.perplexity,
                    "relative": quality.perplexity / reference_perplexity,
                    "divergence": quality.divergence,
                    "agreement": quality.agreement,
                }


# -- Speed ----------------------------------------------------------------------------------------------


def measure_speed(
    rows: Sequence[Row],
    shape: str,
    folder: Path,
    sizes: Sizes,
    pairs: int,
    threads: int | None,
) -> None:
    """Store the speed of each encoding in its row. Runs of the encoding and of the baseline alternate."""
    checkpoint = folder / "floats"
    checkpoint.mkdir()
    write_random_checkpoint(checkpoint, shape_config(shape))
    for row in rows:
        row.baseline = "int4" if ENCODINGS[row.encoding].bits <= MAX_BITS_OF_INT4_BASELINE else "int8"
        with ExitStack() as stack:
            settings = (folder / "speed", sizes, threads)
            baseline_bench = stack.enter_context(open_bench(checkpoint, row.baseline, *settings))
            encoding_bench = stack.enter_context(open_bench(checkpoint, row.encoding, *settings))
            for workload in SPEED_WORKLOADS:
                baseline_bench.speed(workload), encoding_bench.speed(workload)  # warm-up
                for number in range(pairs):
                    order = (
                        (baseline_bench, encoding_bench) if number % 2 else (encoding_bench, baseline_bench)
                    )
                    speeds = {bench: bench.speed(workload) for bench in order}
                    row.speeds.setdefault(workload, []).append(speeds[encoding_bench])
                    row.ratios.setdefault(workload, []).append(
                        speeds[encoding_bench] / speeds[baseline_bench]
                    )
        print(speed_line(row), flush=True)


@contextmanager
def open_bench(
    checkpoint: Path, encoding: str, folder: Path, sizes: Sizes, threads: int | None
) -> Iterator[Bench]:
    """Yield a `Bench` that has loaded a float checkpoint in an encoding."""
    path, quantization_encoding = checkpoint, encoding if is_selectable(encoding) else None
    if quantization_encoding is None:
        path = write_stored(checkpoint, folder / encoding, encoding)
    length = max(sizes.prompt_length + sizes.new_tokens, sizes.prefill_length + 1)
    settings: dict[str, Any] = {
        "model_path": str(path),
        "quantization_encoding": quantization_encoding,
        "max_length": length,
        "max_batch_size": 1,
    }
    if threads is not None:
        settings["num_threads"] = threads
    with Bench(PipelineConfig.from_flat(settings), sizes) as bench:
        yield bench


# -- Output ---------------------------------------------------------------------------------------------


def speed_line(row: Row) -> str:
    """Return the printed line with the speeds of a row."""
    columns = [f"{row.encoding:9}"]
    for workload, speeds in row.speeds.items():
        ratios = sorted(row.ratios[workload])
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        columns.append(
            f"{workload} {statistics.median(speeds):.4g} tokens/s, {statistics.median(ratios):.2f} of "
            f"{row.baseline} ({spread})"
        )
    return "  ".join(columns)


def print_table(rows: Sequence[Row]) -> None:
    """Print the rows as a Markdown table, for docs/performance.md."""
    texts = list(rows[0].quality) if rows else []
    header = ["encoding", "bits per weight"]
    header += [f"perplexity, {name} (change from bfloat16)" for name in texts]
    if rows and rows[0].speeds:
        header += [f"{workload}, tokens/s | ratio to the baseline" for workload in SPEED_WORKLOADS]
    print("\n| " + " | ".join(header) + " |")
    print("|" + "---|" * " | ".join(header).count("|") + "---|")
    for row in rows:
        cells = [row.encoding, f"{row.bits:.2f}"]
        for name in texts:
            quality = row.quality[name]
            cells.append(f"{quality['perplexity']:.4f} ({100 * (quality['relative'] - 1):+.2f} %)")
        for workload, speeds in row.speeds.items():
            ratios = sorted(row.ratios[workload])
            spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
            ratio = f"**{statistics.median(ratios):.2f}** {row.baseline} {spread}"
            cells += [f"{statistics.median(speeds):.4g}", ratio]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
