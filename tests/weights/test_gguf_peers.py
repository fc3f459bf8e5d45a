"""Tokens, logits, dequantized numbers and text of GGUF files agree with llama.cpp. Needs llama-cpp-python."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from support.checkpoints import DECODERS
from support.gguf_files import (
    ARCHITECTURES,
    read_sentencepiece,
    sentencepiece_metadata,
    tokenizer_metadata,
    write_gguf,
)
from support.pipeline_steps import make_context, open_pipeline, step_logits

from penstock import LLM, SamplingParams
from penstock.text.tokenizer_files import read_tokenizer_files
from penstock.weights import Weights
from tests.weights.test_gguf_models import TOKENS, write_family_checkpoint
from tests.weights.test_gguf_tokenizer import TEXTS, write_gguf_file

pytestmark = pytest.mark.peers

BYTE_PIECES = [
    ("<unk>", 0.0),
    ("<s>", 0.0),
    ("</s>", 0.0),
    *((f"<0x{byte:02X}>", 0.0) for byte in range(127)),
]
# Settings that are fixed in llama.cpp, whatever the GGUF file contains, and sizes that it supports.
ASSUMED_SETTINGS: dict[str, dict[str, Any]] = {
    "apertus": {"hidden_size": 64, "num_attention_heads": 4},
    "gemma2": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3_text": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
}


def open_with_llama_cpp(file: Path, **options: Any) -> Any:
    llama_cpp = pytest.importorskip("llama_cpp")
    default_options = {"n_ctx": 256, "n_threads": 1, "verbose": False, "type_k": 0, "type_v": 0}
    return llama_cpp.Llama(model_path=str(file), **default_options | options)


def compute_logits_with_llama_cpp(file: Path, tokens: list[int]) -> torch.Tensor:  # [T, V]
    llama = open_with_llama_cpp(file, logits_all=True)
    llama.eval(tokens)
    return torch.from_numpy(np.array(llama.scores[: len(tokens)]))


def compute_penstock_logits(file: Path, tokens: list[int]) -> torch.Tensor:
    pipeline = open_pipeline(file, quantization_encoding="float32")
    return step_logits(pipeline, [make_context(tokens, log_probabilities_echo=True)])[0]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_are_close_to_the_logits_of_llama_cpp(family: str, tmp_path: Path) -> None:
    checkpoint = write_family_checkpoint(family, tmp_path, **ASSUMED_SETTINGS.get(family, {}))
    file = write_gguf(checkpoint, tmp_path / "m.gguf", metadata=sentencepiece_metadata(BYTE_PIECES))
    expected = compute_logits_with_llama_cpp(file, TOKENS)
    # llama.cpp computes GELU with a table of float16 values, so families with GELU have a larger tolerance.
    tolerance = 0.05 if family.startswith("g") and family != "granite" else 1e-4
    torch.testing.assert_close(compute_penstock_logits(file, TOKENS), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "quantization", ["Q4_0", "Q5_0", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS"]
)
def test_files_quantized_by_llama_cpp_are_dequantized_equally(quantization: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    checkpoint = write_family_checkpoint("llama", tmp_path, **sizes)
    file = write_gguf(checkpoint, tmp_path / "m.gguf", metadata=sentencepiece_metadata(BYTE_PIECES))
    quantized_file, dequantized_file = tmp_path / "packed.gguf", tmp_path / "unpacked.gguf"
    for source, target, type_name in (
        (file, quantized_file, f"MOSTLY_{quantization}"),
        (quantized_file, dequantized_file, "ALL_F32"),
    ):
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_{type_name}"), 1
        params.allow_requantize = True
        error_code = llama_cpp.llama_model_quantize(
            str(source).encode(), str(target).encode(), ctypes.byref(params)
        )
        assert error_code == 0
    gguf_weights, reference_weights, float_weights = (
        Weights.open(quantized_file),
        Weights.open(dequantized_file),
        Weights.open(file),
    )
    assert gguf_weights.names == reference_weights.names == float_weights.names
    for name in gguf_weights.names:
        numbers, shape = gguf_weights.tensor(name, gguf_weights.shape(name)), gguf_weights.shape(name)
        assert torch.equal(numbers, reference_weights.tensor(name, shape)), name
        assert len(shape) == 1 or not torch.equal(numbers, float_weights.tensor(name, shape)), name


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "llama2xs", "stories260K"])
def test_tokens_equal_the_tokens_of_llama_cpp(name: str, tmp_path: Path, shared_data: Path) -> None:
    if name in ("gpt2", "qwen3"):
        reference_tokenizer = read_tokenizer_files(shared_data / "tokenizers" / name).tokenizer
        metadata = tokenizer_metadata(
            json.loads(reference_tokenizer.to_str()), {"gpt2": "gpt-2", "qwen3": "qwen2"}[name]
        )
    else:
        metadata = sentencepiece_metadata(
            read_sentencepiece(shared_data / "models" / name / "tokenizer.model")
        )
    file = write_gguf_file(tmp_path, metadata)
    gguf_tokenizer, llama = read_tokenizer_files(file).tokenizer, open_with_llama_cpp(file, vocab_only=True)
    for text in TEXTS:
        # llama.cpp does not compose U+030A, unlike the tokenizer of the model.
        if "\u030a" in text and name == "qwen3":
            continue
        assert gguf_tokenizer.encode(text).ids == llama.tokenize(text.encode(), add_bos=True, special=True), (
            text
        )


@pytest.mark.parametrize("name", ["llama2xs", "stories260K"])
def test_text_equals_the_text_of_llama_cpp(name: str, tmp_path: Path, shared_data: Path) -> None:
    checkpoint = shared_data / "models" / name
    metadata = sentencepiece_metadata(read_sentencepiece(checkpoint / "tokenizer.model"))
    for float_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        file = write_gguf(checkpoint, tmp_path / "m.gguf", float_type, metadata)
        with LLM(str(file), quantization_encoding="float32") as llm:
            output = llm.generate("Once upon a time", SamplingParams(max_new_tokens=100))[0].text
        options = {"max_tokens": 100, "temperature": 0.0, "repeat_penalty": 1.0}
        assert (
            output
            == open_with_llama_cpp(file).create_completion("Once upon a time", **options)["choices"][0][
                "text"
            ]
        )


def test_all_families_are_in_the_registry() -> None:
    assert set(ARCHITECTURES) <= {architecture.name for architecture in DECODERS}
