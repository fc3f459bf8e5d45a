"""Saved models give the embeddings and scores of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.encoders import ENCODERS, save_encoder
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel

from penstock import LLM

st = pytest.importorskip("sentence_transformers")
WORDS = "a the sky is blue green grass red query passage how many colours has it".split()
SPECIAL_TOKENS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
TEXTS = ["the sky is blue", "grass", "how many colours has the green grass and the red sky"]
POOLINGS = ["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ["mean", "max"]]


def save_random_model(folder: Path, name: str, head: str, **changes: Any) -> Path:
    """Save a random model with a tokenizer, and return the folder."""
    from transformers import PreTrainedTokenizerFast

    (architecture,) = (candidate for candidate in ENCODERS if candidate.name == name)
    save_encoder(architecture, folder, head, **changes)
    tokenizer = Tokenizer(
        WordLevel({word: i for i, word in enumerate(SPECIAL_TOKENS + WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        unk_token="[UNK]",
        model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    return folder


def open_llm(folder: Path) -> LLM:
    return LLM(str(folder), quantization_encoding="float32")


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_embeddings_with_pooling_dense_layer_and_prompts_equal_the_reference(
    pooling: Any, include_prompt: bool, tmp_path: Path
) -> None:
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformer = Transformer(str(save_random_model(tmp_path / "base", "bert", "")))
    pooling_module = Pooling(
        transformer.get_embedding_dimension(), pooling_mode=pooling, include_prompt=include_prompt
    )
    dense = Dense(pooling_module.get_embedding_dimension(), 20)
    model = st.SentenceTransformer(
        modules=[transformer, pooling_module, dense, Normalize()],
        prompts={"query": "query how ", "document": "passage "},
        device="cpu",
    )
    model.save(str(tmp_path / "saved"))
    with open_llm(tmp_path / "saved") as llm:
        assert llm.pipeline.outputs[0] == "dense"
        for name in (None, "query", "document"):
            vectors = llm.embed(TEXTS, use_tqdm=False, prompt_name=name)
            np.testing.assert_allclose(vectors, model.encode(TEXTS, prompt_name=name), atol=1e-5)


def test_embeddings_of_embedding_gemma2_equal_the_reference(tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    transformer = Transformer(str(save_random_model(tmp_path / "base", "embedding_gemma2_text", "")))
    pooling_module = Pooling(40, pooling_mode="mean")
    model = st.SentenceTransformer(
        modules=[transformer, pooling_module, Normalize()],
        prompts={"query": "query how ", "document": "passage "},
        device="cpu",
    )
    model.save(str(tmp_path / "saved"))
    with open_llm(tmp_path / "saved") as llm:
        assert llm.pipeline.embedding_size == 40
        for prompt in (None, "query", "document"):
            vectors = llm.embed(TEXTS, use_tqdm=False, prompt_name=prompt)
            np.testing.assert_allclose(vectors, model.encode(TEXTS, prompt_name=prompt), atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert"])
@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
def test_scores_of_cross_encoders_equal_the_reference(
    name: str, activation: str | None, tmp_path: Path
) -> None:
    folder = save_random_model(tmp_path, name, "ForSequenceClassification", num_labels=1)
    if activation is not None:
        config = json.loads((folder / "config.json").read_text())
        config["sentence_transformers"] = {"activation_fn": activation}
        (folder / "config.json").write_text(json.dumps(config))
    model = st.CrossEncoder(str(folder), device="cpu")
    reference_output = model.predict([(TEXTS[0], text) for text in TEXTS])
    with open_llm(folder) as llm:
        np.testing.assert_allclose(llm.score(TEXTS[0], TEXTS, use_tqdm=False), reference_output, atol=1e-5)


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_sparse_embeddings_equal_the_reference(pooling: str, activation: str, tmp_path: Path) -> None:
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    transformer = MLMTransformer(str(save_random_model(tmp_path / "base", "bert", "ForMaskedLM")))
    pooling_module = SpladePooling(pooling_strategy=pooling, activation_function=activation)
    model = st.SparseEncoder(modules=[transformer, pooling_module], device="cpu")
    model.save(str(tmp_path / "saved"))
    reference_output = model.encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    with open_llm(tmp_path / "saved") as llm:
        for response, expected in zip(llm.encode(TEXTS, use_tqdm=False), reference_output, strict=True):
            assert response.sparse is not None
            weights = np.zeros_like(expected)
            weights[response.sparse.token_ids] = response.sparse.weights
            np.testing.assert_allclose(weights, expected, atol=1e-5)


def test_multi_vector_embeddings_and_scores_equal_the_reference(tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    transformer = Transformer(str(save_random_model(tmp_path / "base", "bert", "")))
    dense = Dense(
        48,
        20,
        bias=False,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
        module_output_name="token_embeddings",
    )
    normalize = Normalize(module_input_name="token_embeddings", module_output_name="token_embeddings")
    model = st.MultiVectorEncoder(
        modules=[transformer, dense, normalize, MultiVectorMask()],
        prompts={"query": "query ", "document": "passage "},
        device="cpu",
    )
    model.save(str(tmp_path / "saved"))
    queries, documents = model.encode_query(TEXTS[:1]), model.encode_document(TEXTS)
    with open_llm(tmp_path / "saved") as llm:
        assert llm.pipeline.outputs[0] == "multi_vector"
        [response] = llm.encode(TEXTS[:1], use_tqdm=False, prompt_name="query")
        scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    np.testing.assert_allclose(response.multi_vector, queries[0], atol=1e-5)
    np.testing.assert_allclose(scores, np.ravel(model.similarity(queries, documents)), atol=1e-4)
