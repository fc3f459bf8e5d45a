"""Measure how each encoding changes a model: perplexity, mean KL divergence, agreement of the top-1 token.

    python benchmarks/quality.py                                  # the embedded model
    python benchmarks/quality.py demo /models/small --json quality.json
    python benchmarks/quality.py /models/one-billion --tokens 8192 --text-file ordinary.txt
    python benchmarks/quality.py /models/small --quantized small-Q4_K_M.gguf small-gptq
    python benchmarks/quality.py --caches int8 fp8                # and bfloat16 with these KV caches

The script uses up to three kinds of text: text that `LLM` samples from the model in float32 at temperature 1
with fixed seeds; for the embedded model, documents held out from its training; and the text of a file. Each
encoding is compared with float32 and with bfloat16. The row "4 bits, plain" is the baseline for int4: every
linear layer except the head is rounded to 4 bits in groups of 32, scaled by the group's largest weight, and
activations stay bfloat16. int4 must be no worse than this row.
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

from against_transformers import machine

from penstock import LLM
from penstock.bench.quality import Quality, compare_all, sample_texts, write_rounded

sys.path.append(str(Path(__file__).parent.parent / "tools"))  # demo_corpus is there

ENCODINGS = ("float32", "bfloat16", "int8", "int4")
REFERENCES = ("float32", "bfloat16")
PLAIN = "4 bits, plain"
LENGTH = 512
HELD_OUT_SEED = 1_000_004  # the seed of the figures in the model card


def main() -> None:
    """Measure the models of the command line and print tables."""
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
        help="quantized checkpoints of the (only) model, measured as stored",
    )
    parser.add_argument("--caches", nargs="*", default=[], help="types of KV caches, with bfloat16 weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(machine())
    found = []
    for model in options.models:
        if model != "demo" and not Path(model).is_dir():
            print(f"\n{model}: skipped, no such folder")
            continue
        found += measure(
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
        options.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=2) + "\n")


def measure(
    model: str,
    tokens: int,
    seed: int,
    threads: int | None,
    text_file: Path | None = None,
    quantized: Sequence[str] = (),
    caches: Sequence[str] = (),
    devices: str = "cpu",
) -> list[dict[str, Any]]:
    """Measure all encodings of a model, KV caches, and quantized checkpoints of it, on all of its texts."""
    opened = partial(open_model, threads=threads, devices=devices)
    exact = opened(model, "float32")
    length = min(LENGTH, exact.pipeline.memory_plan.max_length)
    texts = {
        "its own": sample_texts(
            exact, first_token(exact), count=-(-tokens // length), length=length, seed=seed
        )
    }
    if model == "demo":
        texts["held out"] = held_out_texts(exact, tokens)
    if text_file is not None:
        texts[text_file.name] = texts_of_file(exact, text_file, tokens, length)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_rounded(exact.config.model.checkpoint, Path(folder))
        models = {"float32": exact}
        models |= {encoding: opened(model, encoding) for encoding in ENCODINGS[1:]}
        models[PLAIN] = opened(folder, "bfloat16")
        models |= {f"{cache} cache": opened(model, "bfloat16", cache=cache) for cache in caches}
        models |= {Path(one).name: opened(one, None) for one in quantized}
        for kind, some in texts.items():
            for encoding, against in compare_all(models, some, REFERENCES).items():
                row = {"model": model, "text": kind, "encoding": encoding}
                rows.append(row | {name: asdict(one) for name, one in against.items()})
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
    return LLM(
        model,
        quantization_encoding=encoding,
        enable_prefix_caching=False,
        kv_cache_memory=1 << 28,
        kv_cache_dtype=cache,
        devices=devices,
        num_threads=threads,
    )


def first_token(llm: LLM) -> int:
    """Return the first token of each text: the BOS token, else the padding or EOS token, else 0."""
    config = llm.config.model.huggingface_config
    for key in ("bos_token_id", "pad_token_id", "eos_token_id"):
        if isinstance(token := config.get(key), int):
            return token
    return 0


def texts_of_file(llm: LLM, file: Path, tokens: int, length: int) -> list[list[int]]:
    """Return up to ``tokens`` tokens of a file, in rows of ``length`` that begin with `first_token`."""
    found = llm.tokenizer.backend.encode(file.read_text("utf-8"), add_special_tokens=False).ids[:tokens]
    start = first_token(llm)
    rows = [[start, *found[place : place + length - 1]] for place in range(0, len(found), length - 1)]
    if not rows:
        raise SystemExit(f"{file} has no text")
    return rows


def held_out_texts(llm: LLM, tokens: int) -> list[list[int]]:
    """Return documents of the demo corpus that are held out from the embedded model's training."""
    from demo_corpus.tokens import Encoder, Packer

    packer = Packer(Encoder(llm.tokenizer.backend), HELD_OUT_SEED, held_out=True, distinct=True)
    return [[int(token) for token in packer.row(LENGTH - 1)[0]] for _ in range(-(-tokens // LENGTH))]


def print_tables(model: str, rows: list[dict[str, Any]]) -> None:
    kinds = list(dict.fromkeys(row["text"] for row in rows))
    for kind in kinds:
        own = [row for row in rows if row["text"] == kind]
        base = next(row for row in own if row["encoding"] == "bfloat16")["float32"]["perplexity"]
        print(f"\n{model}, {kind} text, {own[0]['float32']['num_tokens']} tokens")
        print("encoding         perplexity  of bf16   KL float32    KL bf16   top-1 float32   bf16")
        for row in own:
            exact, rounded = Quality(**row["float32"]), Quality(**row["bfloat16"])
            more = 100 * (exact.perplexity / base - 1)
            print(
                f"{row['encoding']:15} {exact.perplexity:11.4f} {more:+7.2f} % {exact.divergence:11.6f} "
                f"{rounded.divergence:10.6f} {100 * exact.agreement:13.2f} % "
                f"{100 * rounded.agreement:6.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
