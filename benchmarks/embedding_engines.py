"""The engines that `benchmarks/embeddings.py` compares. Each engine can have its own Python interpreter.

An engine returns the embeddings of a list of texts. An embedding is the mean of the hidden states, normalized
to length 1. Each engine has the settings that its documentation recommends for a CPU:

- ONNX Runtime and OpenVINO: the texts are sorted by their number of characters and run in batches of 32. The
  texts of a batch are padded to the length of its longest text.
- OpenVINO int8: NNCF quantizes the float32 ONNX model with the activation statistics of 300 texts. A single
  text runs with the hint LATENCY. A list runs with the hint THROUGHPUT in an asynchronous queue.
- llama.cpp: one batch holds several texts, with at most 2048 tokens or the context length of the model,
  whichever is less. The model is a GGUF file, for example in Q8_0.
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
from embedding_texts import make_texts, make_texts_of_all_kinds

MAX_TOKENS = 256
BATCH_SIZE = 32
Embed = Callable[[Sequence[str]], np.ndarray]
"""Returns the embeddings ``[n, E]`` of n texts."""


def penstock_engine(model: str, encoding: str) -> Embed:
    """Return the `Embed` function of Penstock, with weights in ``encoding``."""
    from penstock import LLM

    llm = LLM(model, quantization_encoding=encoding)
    return lambda texts: llm.embed(list(texts), use_tqdm=False, truncate=True)


def sentence_transformers_engine(model: str, _: str) -> Embed:
    """Return the `Embed` function of sentence-transformers, which runs batches of 32 texts."""
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    encoder = SentenceTransformer(model, device="cpu")
    return lambda texts: encoder.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)


def onnx_engine(model: str, path: str) -> Embed:
    """Return the `Embed` function of ONNX Runtime.

    The `Embed` function computes the mean of the hidden states, because the exported model has no pooling.
    """
    import onnxruntime  # type: ignore[import-not-found]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    encode = padding_tokenizer(model)

    def embed(texts: Sequence[str]) -> np.ndarray:
        batches = batches_by_length(texts)
        feeds = [encode([texts[i] for i in indices]) for indices in batches]
        hidden = [session.run(None, feed)[0] for feed in feeds]
        return restore_text_order(batches, map(mean_embeddings, hidden, feeds), len(texts))

    return embed


def onnx_int8_engine(model: str, path: str) -> Embed:
    """Return the `Embed` function of ONNX Runtime with dynamic int8 quantization per channel.

    Quantizes the float32 model at ``path`` and writes the result next to it, unless this result exists.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    target = Path(path).with_name(f"{Path(path).stem}-int8.onnx")
    if not target.is_file():
        quantize_dynamic(path, target, per_channel=True, weight_type=QuantType.QInt8)
    return onnx_engine(model, str(target))


def openvino_engine(model: str, path: str) -> Embed:
    """Return the `Embed` function of OpenVINO. A float32 ONNX model is quantized to int8."""
    import openvino  # type: ignore[import-not-found]

    core = openvino.Core()
    encode = padding_tokenizer(model)
    quantized = _quantized(core, path, encode)
    threads = {"INFERENCE_NUM_THREADS": num_threads()}
    single_text_model = core.compile_model(quantized, "CPU", {"PERFORMANCE_HINT": "LATENCY", **threads})
    request = single_text_model.create_infer_request()
    list_model = core.compile_model(quantized, "CPU", {"PERFORMANCE_HINT": "THROUGHPUT", **threads})
    queue = openvino.AsyncInferQueue(list_model)

    def embed(texts: Sequence[str]) -> np.ndarray:
        batches = batches_by_length(texts)
        feeds = [encode([texts[i] for i in indices]) for indices in batches]
        if len(texts) == 1:
            return mean_embeddings(request.infer(feeds[0])[0], feeds[0])
        embeddings: list[Any] = [None] * len(feeds)

        def store_result(finished_request: Any, index: int) -> None:
            embeddings[index] = mean_embeddings(finished_request.get_output_tensor(0).data, feeds[index])

        queue.set_callback(store_result)
        for index, feed in enumerate(feeds):
            queue.start_async(feed, index)
        queue.wait_all()
        return restore_text_order(batches, embeddings, len(texts))

    return embed


def _quantized(core: Any, path: str, encode: Callable[[Sequence[str]], Mapping[str, np.ndarray]]) -> Any:
    """Return an ONNX model that is quantized to int8 and converted to OpenVINO.

    Quantizes the model and writes the result next to the ONNX file, unless this result exists.
    """
    quantized_file = Path(path).with_name(f"{Path(path).stem}-openvino-int8.xml")
    if not quantized_file.is_file():
        import nncf  # type: ignore[import-not-found]
        import openvino

        samples = [encode([text]) for text in make_texts(300, 4, 128, 3)]
        float_model = core.read_model(path)
        model = nncf.quantize(float_model, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER)
        openvino.save_model(model, quantized_file)
    return core.read_model(quantized_file)


def llama_cpp_engine(_: str, path: str) -> Embed:
    """Return the `Embed` function of llama.cpp through llama-cpp-python, for a GGUF file."""
    import llama_cpp  # type: ignore[import-not-found]

    llama = llama_cpp.Llama(
        path,
        embedding=True,
        pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN,
        n_ctx=0,  # 0: the context length of the model, because texts longer than the context are truncated
        n_batch=2048,
        n_ubatch=2048,
        n_threads=num_threads(),
        n_threads_batch=num_threads(),
        verbose=False,
    )

    def embed(texts: Sequence[str]) -> np.ndarray:
        return np.array(llama.embed(list(texts), normalize=True, truncate=True), np.float32)

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
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def padding_tokenizer(model: str) -> Callable[[Sequence[str]], Mapping[str, np.ndarray]]:
    """Return a function that converts texts to the inputs of an exported BERT.

    The function pads the texts of a call to the length of the longest text.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()

    def encode(texts: Sequence[str]) -> dict[str, np.ndarray]:
        encodings = tokenizer.encode_batch(list(texts))
        ids = np.array([encoding.ids for encoding in encodings])
        mask = np.array([encoding.attention_mask for encoding in encodings])
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}

    return encode


def batches_by_length(texts: Sequence[str]) -> list[list[int]]:
    """Return the indices of the texts in batches of 32, texts with the fewest characters first."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    return [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]


def mean_embeddings(hidden: np.ndarray, feed: Mapping[str, np.ndarray]) -> np.ndarray:  # [n, E]
    """Return the mean of the hidden states ``[n, T, E]`` of each text, normalized to length 1."""
    mask = feed["attention_mask"]
    pooled: np.ndarray = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)


def restore_text_order(
    batches: Sequence[Sequence[int]], embeddings: Any, num_texts: int
) -> np.ndarray:  # [n, E]
    """Return the embeddings of all batches in the order of the texts.

    Args:
        batches: for each batch, the indices of its texts.
        embeddings: for each batch, the embeddings of its texts.
        num_texts: the number of texts.
    """
    ordered: list[Any] = [None] * num_texts
    for indices, rows in zip(batches, embeddings, strict=True):
        for i, row in zip(indices, rows, strict=True):
            ordered[i] = row
    return np.stack(ordered)


def export(model: str, path: str) -> None:
    """Export a BERT in float32 as an ONNX model that returns the hidden states.

    The batch size and the length of the inputs are dynamic.
    """
    import torch
    from transformers import AutoModel

    class HiddenStateModel(torch.nn.Module):
        """An encoder that returns only its hidden states ``[n, T, E]``."""

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
        HiddenStateModel(),
        example,
        path,
        input_names=names,
        output_names=["hidden"],
        dynamic_shapes=dict.fromkeys(names, sizes),
        external_data=False,
    )


def serve(model: str, engine: str, option: str) -> None:
    """Load an engine and run the workloads that standard input names, one name per line.

    Prints an empty JSON object when the engine is loaded and warmed up, and then the result of each workload
    as one line of JSON. If a package is missing, prints an object with ``skipped`` and returns.

    Args:
        model: the folder of the checkpoint.
        engine: a key of `ENGINES`.
        option: the encoding of Penstock, or the file that another engine loads.
    """
    try:
        embed = ENGINES[engine](model, option)
    except ImportError as problem:
        print(json.dumps({"skipped": f"{problem} in {sys.executable}"}), flush=True)
        return
    texts = {
        "mixed": make_texts(256, 8, MAX_TOKENS, 1),
        "short": make_texts(512, 4, 12, 2),
        "vectors": make_texts_of_all_kinds(500, 7),
    }
    embed(texts["mixed"][:32])
    for _ in range(3):
        for text in texts["short"][:50]:
            embed([text])
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run_workload(embed, texts, line.strip())), flush=True)


def run_workload(embed: Embed, texts: Mapping[str, Sequence[str]], name: str) -> Any:
    """Run a workload and return its result.

    Args:
        embed: the engine.
        texts: the texts of each workload. The workload ``single`` runs texts of the workload ``short``.
        name: ``mixed`` and ``short`` return texts per second, ``single`` the median milliseconds per text,
            ``memory`` the private memory of this process in MiB, ``vectors`` the embeddings.
    """
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
    options = parser.parse_args()
    if options.engine == "export":
        export(options.model, options.option)
    else:
        serve(options.model, options.engine, options.option)
