"""Embeddings of one model by Penstock and other engines, in turn: throughput, latency, memory, accuracy.

    python benchmarks/embeddings.py --model FOLDER                          # Penstock in all encodings
    python benchmarks/embeddings.py --model FOLDER --sentence-transformers \\
        --onnx model.onnx --onnx model_int8.onnx --json out.json

Each engine runs in a separate process, which waits while another engine runs. A round runs every engine once;
the result is the median of the rounds. Work:

- ``mixed``: texts of 8 to 256 tokens, as one list.
- ``short``: queries of 4 to 12 tokens, as one list.
- ``single``: one short query at a time; the figure is the latency in milliseconds.

ONNX Runtime gets the texts sorted by length, in batches of 32, padded to the longest of the batch, which is
its best setting here. sentence-transformers sorts the texts too. The cosine compares with
sentence-transformers, or with Penstock in float32 if sentence-transformers is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WORDS = (
    "the a of to and in that it is was for on with as by at from this be have water time people house year "
    "small large river city night light music paper book train garden winter question answer machine number"
).split()
Embed = Callable[[Sequence[str]], np.ndarray]


def make_texts(count: int, shortest: int, longest: int, seed: int) -> list[str]:
    """Return texts of about as many tokens as words, with lengths spread evenly."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(shortest, longest) - 2)) for _ in range(count)]


def penstock_engine(model: str, encoding: str) -> Embed:
    """Penstock with this encoding."""
    from penstock import LLM

    llm = LLM(model, quantization_encoding=encoding)
    return lambda texts: llm.embed(list(texts), use_tqdm=False, truncate=True)


def sentence_transformers_engine(model: str, _: str) -> Embed:
    """sentence-transformers, in batches of 32."""
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    loaded = SentenceTransformer(model, device="cpu")
    return lambda texts: loaded.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)


def onnx_engine(model: str, path: str) -> Embed:
    """ONNX Runtime with mean pooling."""
    import onnxruntime  # type: ignore[import-not-found]
    from tokenizers import Tokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def embed(texts: Sequence[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors: list[Any] = [None] * len(texts)
        for start in range(0, len(order), 32):
            chosen = order[start : start + 32]
            encodings = tokenizer.encode_batch([texts[i] for i in chosen])
            ids = np.array([one.ids for one in encodings])
            mask = np.array([one.attention_mask for one in encodings])
            feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            [hidden] = session.run(None, feed)
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
            for i, vector in zip(chosen, pooled, strict=True):
                vectors[i] = vector
        return np.stack(vectors)

    return embed


ENGINES = {
    "penstock": penstock_engine,
    "sentence-transformers": sentence_transformers_engine,
    "onnx": onnx_engine,
}


def work(model: str, engine: str, option: str) -> None:
    """Load an engine, then run a work for each line of standard input and print its result as JSON."""
    embed = ENGINES[engine](model, option)
    texts = {"mixed": make_texts(256, 8, 256, 1), "short": make_texts(512, 4, 12, 2)}
    embed(texts["mixed"][:32])
    embed(texts["short"][:1])
    print("ready", flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name == "vectors":
            result: Any = embed(texts["mixed"][:64]).tolist()
        elif name == "memory":
            result = _private_memory()
        elif name == "single":
            times = []
            for text in texts["short"][:50]:
                start = time.perf_counter()
                embed([text])
                times.append(time.perf_counter() - start)
            result = 1000 * statistics.median(times)
        else:
            start = time.perf_counter()
            embed(texts[name])
            result = len(texts[name]) / (time.perf_counter() - start)
        print(json.dumps(result), flush=True)


def _private_memory() -> float:
    """Return the private memory of this process in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


class Engine:
    """An engine in a separate process."""

    def __init__(self, model: str, engine: str, option: str) -> None:
        self.name = f"{engine} {Path(option).stem}".strip()
        command = [sys.executable, __file__, "--model", model, "--worker", engine, option]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def run(self, name: str) -> Any:
        """Run a work and return its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._process.wait()}")
        return line


def main() -> None:
    """Run all engines in turn and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="folder in the sentence-transformers layout")
    parser.add_argument("--encoding", action="append", help="encodings of Penstock; all four by default")
    parser.add_argument("--sentence-transformers", action="store_true")
    parser.add_argument("--onnx", action="append", default=[], help="a model for ONNX Runtime")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.model, *options.worker)
        return
    encodings = options.encoding or ["float32", "bfloat16", "int8", "int4"]
    wanted = [("penstock", encoding) for encoding in encodings]
    wanted += [("sentence-transformers", "")] * options.sentence_transformers
    wanted += [("onnx", path) for path in options.onnx]
    engines = [Engine(options.model, *one) for one in wanted]
    figures: dict[str, dict[str, list[float]]] = {one.name: {} for one in engines}
    for _ in range(options.rounds):
        for name in ("mixed", "short", "single"):
            for one in engines:
                figures[one.name].setdefault(name, []).append(one.run(name))
    vectors = {one.name: np.array(one.run("vectors")) for one in engines}
    truth = vectors.get("sentence-transformers", vectors[engines[0].name])
    rows = {}
    for one in engines:
        medians = {name: statistics.median(values) for name, values in figures[one.name].items()}
        cosine = float((vectors[one.name] * truth).sum(1).min())
        rows[one.name] = {**medians, "memory": one.run("memory"), "cosine": cosine}
        one.close()
    print(f"{'engine':28}{'mixed/s':>10}{'short/s':>10}{'single ms':>11}{'MiB':>8}{'min cosine':>12}")
    for name, row in rows.items():
        print(
            f"{name:28}{row['mixed']:10.1f}{row['short']:10.1f}{row['single']:11.2f}{row['memory']:8.0f}"
            f"{row['cosine']:12.6f}"
        )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "rounds": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
