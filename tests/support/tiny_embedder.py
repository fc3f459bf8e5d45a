"""A small random BERT checkpoint with a WordPiece tokenizer and a sentence-transformers layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

PAD, CLS, SEP, UNKNOWN = 0, 1, 2, 3
WORDS = (
    "the a cat dog sat ran on mat road red blue house car is was big small hello world query passage : ? ."
).split()
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
TOKENS = list(
    dict.fromkeys(
        ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    )
)
HIDDEN, INNER, LAYERS, POSITIONS = 32, 48, 2, 64


def write_tiny_embedder(
    folder: Path,
    *,
    labels: int = 0,
    modules: tuple[str, ...] | None = ("Transformer", "Pooling", "Normalize"),
    pooling: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    max_seq_length: int | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a checkpoint and return its folder.

    Args:
        folder: the folder to write.
        labels: the number of labels of the classification head. 0 writes an embedder without a head. A
            checkpoint with a head has no sentence-transformers layout.
        modules: the module types in ``modules.json``; None writes no sentence-transformers layout.
        pooling: the configuration of the pooling module, by default mean pooling.
        settings: the content of ``config_sentence_transformers.json``.
        max_seq_length: the value in ``sentence_bert_config.json``.
        seed: seed of the weights.
        **config: changed or added values of ``config.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    module = "BertForSequenceClassification" if labels else "BertModel"
    values: dict[str, Any] = {
        "architectures": [module],
        "model_type": "bert",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": INNER,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "vocab_size": len(TOKENS),
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": PAD,
        "dtype": "float32",
    }
    if labels:
        values["id2label"] = {str(i): f"label {i}" for i in range(labels)}
        modules = None
    _write(folder / "config.json", values | config)
    save_file(_weights(labels, np.random.default_rng(seed)), folder / "model.safetensors")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "sep_token": "[SEP]"})
    if modules is not None:
        paths = {
            module: "" if module == "Transformer" else f"{i}_{module}" for i, module in enumerate(modules)
        }
        rows = [
            {
                "idx": i,
                "name": str(i),
                "path": paths[module],
                "type": f"sentence_transformers.models.{module}",
            }
            for i, module in enumerate(modules)
        ]
        _write(folder / "modules.json", rows)
        if "Pooling" in paths:
            _write(
                folder / paths["Pooling"] / "config.json",
                {"word_embedding_dimension": HIDDEN, **(pooling or {"pooling_mode_mean_tokens": True})},
            )
    if settings is not None:
        _write(folder / "config_sentence_transformers.json", settings)
    if max_seq_length is not None:
        _write(folder / "sentence_bert_config.json", {"max_seq_length": max_seq_length})
    return folder


def write_tiny_adapter(folder: Path, seed: int = 0) -> Path:
    """Write a LoRA adapter of rank 2 and alpha 4 on the query projections, and return its folder."""
    folder.mkdir(parents=True)
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        name = f"base_model.model.encoder.layer.{layer}.attention.self.query"
        for matrix, shape in (("A", (2, HIDDEN)), ("B", (HIDDEN, 2))):
            tensors[f"{name}.lora_{matrix}.weight"] = rng.normal(0, 0.5, shape).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"]}
    _write(folder / "adapter_config.json", config)
    return folder


def tiny_tokenizer() -> Tokenizer:
    """Return a WordPiece tokenizer that splits unknown words into letters."""
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[UNK]"])
    return tokenizer


def _weights(labels: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(TOKENS), HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "embeddings.LayerNorm": (HIDDEN,),
        "pooler.dense": (HIDDEN, HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        shapes |= {
            f"{name}.attention.self.{projection}": (HIDDEN, HIDDEN)
            for projection in ("query", "key", "value")
        }
        shapes |= {f"{name}.attention.output.dense": (HIDDEN, HIDDEN)}
        shapes |= {f"{name}.intermediate.dense": (INNER, HIDDEN), f"{name}.output.dense": (HIDDEN, INNER)}
        shapes |= {f"{name}.{module}.LayerNorm": (HIDDEN,) for module in ("attention.output", "output")}
    if labels:
        shapes["classifier"] = (labels, HIDDEN)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        full_name = name if name.startswith("classifier") or not labels else f"bert.{name}"
        if name.endswith(".weight"):
            tensors[full_name] = rng.normal(0, 0.5, shape)
            continue
        weight = 1 + rng.normal(0, 0.1, shape) if len(shape) == 1 else rng.normal(0, 0.3, shape)
        tensors[f"{full_name}.weight"] = weight
        tensors[f"{full_name}.bias"] = rng.normal(0, 0.1, shape[:1])
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
