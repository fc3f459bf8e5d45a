"""Measure the quality of weight encodings: perplexity, mean KL divergence, agreement of the top-1 token.

    python benchmarks/quality.py                                  # the demo model in the package
    python benchmarks/quality.py demo /models/small --json quality.json
    python benchmarks/quality.py /models/one-billion --tokens 8192 --text-file ordinary.txt
    python benchmarks/quality.py /models/small --quantized small-Q4_K_M.gguf small-gptq
    python benchmarks/quality.py --caches int8 fp8                # also bfloat16 with these KV cache types

The script uses up to three kinds of text:

- texts that `LLM` samples from the model in float32 at temperature 1 with fixed seeds,
- for the demo model, documents that were held out from its training,
- the text of ``--text-file``.

Each encoding is compared with float32 and with bfloat16. The row "4 bits, plain" is the baseline for int4. It
has bfloat16 activations. Its linear weights, except LM head and routers, are rounded to 4 bits in groups of
32, scaled by the largest magnitude in the group. int4 must be at least as good as this baseline.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from against_transformers import describe_machine

from penstock import LLM
from penstock.bench.quality import Quality, compare_all, sample_texts, write_rounded

sys.path.append(str(Path(__file__).parent.parent / "tools"))  # the folder of demo_corpus

ENCODINGS = ("float32", "bfloat16", "int8", "int4")
REFERENCES = ("float32", "bfloat16")
ROUNDED_BASELINE = "4 bits, plain"
TEXT_LENGTH = 512
HELD_OUT_SEED = 1_000_004  # the model card has figures for the documents of this seed


def main() -> None:
    """Measure the models that the command line selects. Prints a table for each model and kind of text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["demo"])
    parser.add_argument("--tokens", type=int, default=24 * 1024)
    parser.add_argument("--text-file", type=Path, help="also measure up to --tokens of this UTF-8 file")
    parser.add_argument(
        "--quantized",
        nargs="*",
        default=[],
        help="quantized checkpoints of the model, measured in their stored encoding",
    )
    parser.add_argument(
        "--caches", nargs="*", default=[], help="data types of KV caches, measured with bfloat16 weights"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(describe_machine())
    rows = []
    for model in options.models:
        if model != "demo" and not Path(model).is_dir():
            print(f"\n{model}: skipped, the folder does not exist")
            continue
        rows += measure(
            model,
            options.tokens,
            options.seed,
            options.threads,
            options.text_file,
            options.quantized,
            options.caches,
            options.devices,
        )
    if options.json:
        options.json.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=2) + "\n")


def measure(
    model: str,
    num_tokens: int,
    seed: int,
    threads: int | None,
    text_file: Path | None = None,
    quantized: Sequence[str] = (),
    caches: Sequence[str] = (),
    devices: str = "cpu",
) -> list[dict[str, Any]]:
    """Measure encodings, KV cache types and quantized checkpoints of a model on all texts.

    Prints a table for each kind of text and returns the rows of all tables.
    """
    open_with = partial(open_model, threads=threads, devices=devices)
    float32_llm = open_with(model, "float32")
    length = min(TEXT_LENGTH, float32_llm.pipeline.memory_plan.max_length)
    texts = {
        "sampled": sample_texts(
            float32_llm, start_token(float32_llm), count=-(-num_tokens // length), length=length, seed=seed
        )
    }
    if model == "demo":
        texts["held out"] = held_out_texts(float32_llm, num_tokens)
    if text_file is not None:
        texts[text_file.name] = read_texts(float32_llm, text_file, num_tokens, length)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_rounded(float32_llm.config.model.checkpoint, Path(folder))
        models = {"float32": float32_llm}
        models |= {encoding: open_with(model, encoding) for encoding in ENCODINGS[1:]}
        models[ROUNDED_BASELINE] = open_with(folder, "bfloat16")
        models |= {f"{cache} cache": open_with(model, "bfloat16", cache=cache) for cache in caches}
        models |= {Path(checkpoint).name: open_with(checkpoint, None) for checkpoint in quantized}
        for kind, token_lists in texts.items():
            for encoding, by_reference in compare_all(models, token_lists, REFERENCES).items():
                row = {"model": model, "text": kind, "encoding": encoding}
                rows.append(row | {name: asdict(quality) for name, quality in by_reference.items()})
        for llm in models.values():
            llm.close()
    print_tables(model, rows)
    return rows


def open_model(
    model: str,
    encoding: str | None,
    *,
    threads: int | None,
    devices: str,
    cache: str | None = None,
) -> LLM:
    """Load a model for the measurement, without a prefix cache."""
    return LLM(
        model,
        quantization_encoding=encoding,
        enable_prefix_caching=False,
        kv_cache_memory=1 << 28,
        kv_cache_dtype=cache,
        devices=devices,
        num_threads=threads,
    )


def start_token(llm: LLM) -> int:
    """Return the token that begins each text: BOS, or else the padding token, EOS, or 0."""
    config = llm.config.model.huggingface_config
    for key in ("bos_token_id", "pad_token_id", "eos_token_id"):
        if isinstance(token := config.get(key), int):
            return token
    return 0


def read_texts(llm: LLM, file: Path, num_tokens: int, length: int) -> list[list[int]]:
    """Return texts of up to ``length`` tokens that begin with `start_token` and continue with a file.

    Only the first ``num_tokens`` tokens of the file are used.
    """
    encoded = llm.tokenizer.backend.encode(file.read_text("utf-8"), add_special_tokens=False)
    token_ids = encoded.ids[:num_tokens]
    start = start_token(llm)
    size = length - 1
    rows = [[start, *token_ids[i : i + size]] for i in range(0, len(token_ids), size)]
    if not rows:
        raise SystemExit(f"{file} is empty")
    return rows


def held_out_texts(llm: LLM, num_tokens: int) -> list[list[int]]:
    """Return packed rows of demo corpus documents that were held out from the demo model's training."""
    from demo_corpus.tokens import Encoder, Packer

    packer = Packer(Encoder(llm.tokenizer.backend), HELD_OUT_SEED, held_out=True, distinct=True)
    num_texts = -(-num_tokens // TEXT_LENGTH)
    return [[int(token) for token in packer.row(TEXT_LENGTH - 1)[0]] for _ in range(num_texts)]


def print_tables(model: str, rows: list[dict[str, Any]]) -> None:
    """Print a table for each kind of text."""
    kinds = list(dict.fromkeys(row["text"] for row in rows))
    for kind in kinds:
        table = [row for row in rows if row["text"] == kind]
        bf16_perplexity = next(row for row in table if row["encoding"] == "bfloat16")["float32"]["perplexity"]
        print(f"\n{model}, {kind} text, {table[0]['float32']['num_tokens']} tokens")
        print("encoding         perplexity  vs bf16   KL float32    KL bf16   top-1 float32   bf16")
        for row in table:
            versus_fp32, versus_bf16 = Quality(**row["float32"]), Quality(**row["bfloat16"])
            change = 100 * (versus_fp32.perplexity / bf16_perplexity - 1)
            print(
                f"{row['encoding']:15} {versus_fp32.perplexity:11.4f} {change:+7.2f} % "
                f"{versus_fp32.divergence:11.6f} {versus_bf16.divergence:10.6f} "
                f"{100 * versus_fp32.agreement:13.2f} % {100 * versus_bf16.agreement:6.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
