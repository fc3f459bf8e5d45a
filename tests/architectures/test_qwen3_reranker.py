"""Qwen 3 as a reranker: scores from the logits of "yes" and "no", truncation, and embedders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import load_in_transformers, write_checkpoint
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from penstock import LLM
from penstock.architectures.qwen3 import tiny_config
from penstock.architectures.qwen3.tokenizer import TEMPLATE
from penstock.assembly import load_tokenizer
from penstock.config import PipelineConfig
from penstock.errors import InputError, UnsupportedFeatureError
from penstock.pipelines.core import EmbeddingsGenerationRequest

QUERY, DOCUMENT = "which colour has the sky", "the sky is blue"
OPTIONS = {"task": "embeddings-generation", "quantization_encoding": "float32"}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    texts = [TEMPLATE.prefix, TEMPLATE.body, TEMPLATE.suffix, TEMPLATE.instruction, QUERY, DOCUMENT, "yes no"]
    pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\W"), "isolated")
    words = [word for text in texts for word, _ in pre_tokenizer.pre_tokenize_str(text)]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(["[UNK]", *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizer
    config = tiny_config() | {"vocab_size": len(vocabulary), "tie_word_embeddings": request.param}
    write_checkpoint(folder, config)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def expected_logits(
    folder: Path, query: str, document: str, instruction: str
) -> torch.Tensor:  # [2]: logits of "no" and "yes"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    ids = tokenizer.encode(TEMPLATE.prefix + body + TEMPLATE.suffix).ids
    with torch.inference_mode():
        logits = load_in_transformers(folder)(torch.tensor([ids])).logits[0, -1]
    answer_logits: torch.Tensor = logits[[tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")]]
    return answer_logits


def test_scores_are_the_probability_of_yes_or_the_difference_of_the_logits(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        assert llm.pipeline.outputs == ("scores",)
        scores = llm.score(QUERY, [DOCUMENT, "blue is the colour"], use_tqdm=False)
        logits = llm.score(QUERY, DOCUMENT, use_tqdm=False, activation=False)
        fields: dict[str, Any] = {"text_pair": DOCUMENT, "instruction": "is the sky blue"}
        [response] = llm.encode(QUERY, use_tqdm=False, outputs=["scores"], **fields)
    no_logit, yes_logit = expected_logits(folder, QUERY, DOCUMENT, TEMPLATE.instruction)
    assert logits[0] == pytest.approx(float(yes_logit - no_logit), abs=1e-3)
    for score, text in zip(scores, [DOCUMENT, "blue is the colour"], strict=True):
        expected = expected_logits(folder, QUERY, text, TEMPLATE.instruction).softmax(-1)[1]
        assert score == pytest.approx(float(expected), abs=1e-4)
    expected = expected_logits(folder, QUERY, DOCUMENT, "is the sky blue").softmax(-1)[1]
    assert response.scores is not None
    assert response.scores[0] == pytest.approx(float(expected), abs=1e-4)


def test_truncation_keeps_the_suffix_of_the_template(folder: Path) -> None:
    tokenizer = load_tokenizer(PipelineConfig.from_flat({"model_path": str(folder), **OPTIONS}))

    def encode(max_tokens: int | None) -> np.ndarray:
        tokens: np.ndarray = tokenizer.build_embeddings_context(
            EmbeddingsGenerationRequest(
                id="1",
                input=QUERY,
                text_pair=DOCUMENT,
                truncate=max_tokens is not None,
                max_tokens=max_tokens,
            )
        ).next_tokens
        return tokens

    suffix = tokenizer.backend.encode(TEMPLATE.suffix).ids
    full_ids, truncated_ids = encode(None), encode(150)
    assert len(truncated_ids) == 150 < len(full_ids)
    num_kept_tokens = 150 - len(suffix)
    assert truncated_ids.tolist() == [*full_ids[:num_kept_tokens].tolist(), *suffix]
    with pytest.raises(InputError, match="cannot cut the input to 40 tokens"):
        encode(40)


def test_a_checkpoint_with_a_pooling_module_is_an_embedder(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    with LLM(str(tmp_path), quantization_encoding="float32") as llm:
        assert llm.pipeline.outputs == ("dense", "multi_vector")
        with pytest.raises(UnsupportedFeatureError, match="no template with an instruction"):
            llm.encode(QUERY, use_tqdm=False, instruction="is it")
