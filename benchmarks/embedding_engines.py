"""The engines that `benchmarks/embeddings.py` compares. Each runs in the Python of its virtual environment.

An engine embeds a list of texts: mean of the hidden states, length 1. Its settings are those that its
documentation recommends for a CPU:

- ONNX Runtime and OpenVINO get lists sorted by length, in batches of 32 padded to the longest of a batch.
- OpenVINO int8 is the ONNX model in float32, quantized by NNCF with activation statistics of 300 texts. One
  text runs with the hint LATENCY. Lists run with the hint THROUGHPUT in an asynchronous queue.
- llama.cpp packs several texts into one batch of 2048 tokens. It reads a GGUF file, such as one in Q8_0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from embedding_texts import make_texts, make_texts_of_all_scripts

MAX_TOKENS = 256
BATCH = 32
Embed = Callable[[Sequence[str]], np.ndarray]
"""Texts -> ``[n, E]``."""


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

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    encode = padding_tokenizer(model)

    def embed(texts: Sequence[str]) -> np.ndarray:
        batches = batches_by_length(texts)
        feeds = [encode([texts[i] for i in chosen]) for chosen in batches]
        hidden = [session.run(None, feed)[0] for feed in feeds]
        return in_order(batches, map(mean_of, hidden, feeds), len(texts))

    return embed


def onnx_int8_engine(model: str, path: str) -> Embed:
    """ONNX Runtime with its dynamic quantization of a model in float32, per channel."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    target = Path(path).with_name(f"{Path(path).stem}-int8.onnx")
    if not target.is_file():
        quantize_dynamic(path, target, per_channel=True, weight_type=QuantType.QInt8)
    return onnx_engine(model, str(target))


def openvino_engine(model: str, path: str) -> Embed:
    """OpenVINO in int8, from an ONNX model in float32."""
    import openvino  # type: ignore[import-not-found]

    core = openvino.Core()
    encode = padding_tokenizer(model)
    quantized = _quantized(core, path, encode)
    threads = {"INFERENCE_NUM_THREADS": num_threads()}
    one = core.compile_model(quantized, "CPU", {"PERFORMANCE_HINT": "LATENCY", **threads})
    request = one.create_infer_request()
    many = core.compile_model(quantized, "CPU", {"PERFORMANCE_HINT": "THROUGHPUT", **threads})
    queue = openvino.AsyncInferQueue(many)

    def embed(texts: Sequence[str]) -> np.ndarray:
        batches = batches_by_length(texts)
        feeds = [encode([texts[i] for i in chosen]) for chosen in batches]
        if len(texts) == 1:
            return mean_of(request.infer(feeds[0])[0], feeds[0])
        found: list[Any] = [None] * len(feeds)

        def take(done: Any, index: int) -> None:
            found[index] = mean_of(done.get_output_tensor(0).data, feeds[index])

        queue.set_callback(take)
        for index, feed in enumerate(feeds):
            queue.start_async(feed, index)
        queue.wait_all()
        return in_order(batches, found, len(texts))

    return embed


def _quantized(core: Any, path: str, encode: Callable[[Sequence[str]], Mapping[str, np.ndarray]]) -> Any:
    """Return a model in int8. The result is kept beside the ONNX file."""
    target = Path(path).with_name(f"{Path(path).stem}-openvino-int8.xml")
    if not target.is_file():
        import nncf  # type: ignore[import-not-found]
        import openvino

        samples = [encode([text]) for text in make_texts(300, 4, 128, 3)]
        plain = core.read_model(path)
        model = nncf.quantize(plain, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER)
        openvino.save_model(model, target)
    return core.read_model(target)


def llama_cpp_engine(_: str, path: str) -> Embed:
    """llama.cpp through llama-cpp-python, for a GGUF file."""
    import llama_cpp  # type: ignore[import-not-found]

    loaded = llama_cpp.Llama(
        path,
        embedding=True,
        pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN,
        n_ctx=0,  # that of the model: the longest text
        n_batch=2048,
        n_ubatch=2048,
        n_threads=num_threads(),
        n_threads_batch=num_threads(),
        verbose=False,
    )

    def embed(texts: Sequence[str]) -> np.ndarray:
        return np.array(loaded.embed(list(texts), normalize=True, truncate=True), np.float32)

    return embed


ENGINES = {
    "penstock": penstock_engine,
    "sentence-transformers": sentence_transformers_engine,
    "onnx": onnx_engine,
    "onnx-int8": onnx_int8_engine,
    "openvino": openvino_engine,
    "llama-cpp": llama_cpp_engine,
}


def num_threads() -> int:
    """Return the number of processors of this process."""
    return len(os.sched_getaffinity(0))


def padding_tokenizer(model: str) -> Callable[[Sequence[str]], Mapping[str, np.ndarray]]:
    """Return a function from texts to the inputs of an exported BERT, padded to the longest text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()

    def encode(texts: Sequence[str]) -> dict[str, np.ndarray]:
        encodings = tokenizer.encode_batch(list(texts))
        ids = np.array([one.ids for one in encodings])
        mask = np.array([one.attention_mask for one in encodings])
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}

    return encode


def batches_by_length(texts: Sequence[str]) -> list[list[int]]:
    """Return the indices of the texts in batches, the shortest texts first."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


def mean_of(hidden: np.ndarray, feed: Mapping[str, np.ndarray]) -> np.ndarray:  # [n, E]
    """Return the mean of the hidden states ``[n, T, E]`` of each text, of length 1."""
    mask = feed["attention_mask"]
    pooled: np.ndarray = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def in_order(batches: Sequence[Sequence[int]], vectors: Any, count: int) -> np.ndarray:  # [n, E]
    """Return the vectors of all batches in the order of the texts."""
    found: list[Any] = [None] * count
    for chosen, rows in zip(batches, vectors, strict=True):
        for i, vector in zip(chosen, rows, strict=True):
            found[i] = vector
    return np.stack(found)


def export(model: str, path: str) -> None:
    """Write a BERT in float32 as an ONNX model of its hidden states, for batches and lengths of all sizes."""
    import torch
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        """The hidden states ``[n, T, E]`` of an encoder."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = AutoModel.from_pretrained(model, dtype=torch.float32).eval()

        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
        ) -> torch.Tensor:
            inputs = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
            hidden: torch.Tensor = self.encoder(input_ids, **inputs).last_hidden_state
            return hidden

    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = tuple(torch.ones(2, 9, dtype=torch.int64) for _ in names)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=512)}
    torch.onnx.export(
        Hidden(),
        example,
        path,
        input_names=names,
        output_names=["hidden"],
        dynamic_shapes=dict.fromkeys(names, sizes),
        external_data=False,
    )


def serve(model: str, engine: str, option: str) -> None:
    """Load an engine, then run a work for each line of standard input and print its result as JSON."""
    try:
        embed = ENGINES[engine](model, option)
    except ImportError as problem:
        print(json.dumps({"skipped": f"{problem} in {sys.executable}"}), flush=True)
        return
    texts = {
        "mixed": make_texts(256, 8, MAX_TOKENS, 1),
        "short": make_texts(512, 4, 12, 2),
        "vectors": make_texts_of_all_scripts(500, 7),
    }
    embed(texts["mixed"][:32])
    for _ in range(3):
        for text in texts["short"][:50]:
            embed([text])
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run_work(embed, texts, line.strip())), flush=True)


def run_work(embed: Embed, texts: Mapping[str, Sequence[str]], name: str) -> Any:
    """Return the result of a work: texts per second, milliseconds of one text, MiB, or vectors."""
    if name == "vectors":
        return embed(texts[name]).tolist()
    if name == "memory":
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024
    if name == "single":
        times = []
        for text in texts["short"][:50]:
            start = time.perf_counter()
            embed([text])
            times.append(time.perf_counter() - start)
        return 1000 * statistics.median(times)
    start = time.perf_counter()
    embed(texts[name])
    return len(texts[name]) / (time.perf_counter() - start)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("model", "engine", "option"):
        parser.add_argument(name)
    given = parser.parse_args()
    if given.engine == "export":
        export(given.model, given.option)
    else:
        serve(given.model, given.engine, given.option)
