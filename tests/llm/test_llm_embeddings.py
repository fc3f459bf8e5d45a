"""`LLM.embed`, `encode`, `score`, `rerank` and `classify`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_embedder import CLS, HIDDEN, SEP, TOKENS, write_tiny_adapter, write_tiny_embedder
from support.tiny_llm import write_tiny_llm

from penstock import LLM
from penstock.errors import (
    InputError,
    PenstockError,
    PromptTooLongError,
    TaskMismatchError,
    UnsupportedFeatureError,
)

TEXTS = ["the cat sat on the mat", "hello world", "a big red car"]
PROMPTS = {"prompts": {"query": "query: ", "passage": "passage: "}}
CAT_TOKENS = [CLS, TOKENS.index("cat"), SEP]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("embedder")
    with LLM(str(write_tiny_embedder(folder, settings=PROMPTS, matryoshka_dimensions=[8]))) as llm:
        yield llm


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(write_tiny_embedder(tmp_path_factory.mktemp("reranker"), labels=1))) as llm:
        yield llm


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(write_tiny_embedder(tmp_path_factory.mktemp("classifier"), labels=3))) as llm:
        yield llm


def test_one_text_gives_a_vector_and_several_a_matrix(llm: LLM) -> None:
    vectors = llm.embed(TEXTS)
    assert vectors.shape == (3, HIDDEN)
    assert vectors.dtype == np.float32
    for text, vector in zip(TEXTS, vectors, strict=True):
        single_vector = llm.embed(text)
        assert single_vector.shape == (HIDDEN,)
        assert np.array_equal(single_vector, vector)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


def test_a_step_computes_many_short_inputs(llm: LLM) -> None:
    batch_sizes = []
    execute = llm.pipeline.execute

    def count_and_execute(batch: Any, num_steps: int = 1) -> Any:
        batch_sizes.append(len(batch))
        return execute(batch, num_steps)

    llm.pipeline.execute = count_and_execute
    try:
        llm.embed(TEXTS * 30)
    finally:
        del llm.pipeline.execute
    assert batch_sizes == [90]


def test_token_ids_are_accepted_as_inputs(llm: LLM) -> None:
    expected = llm.embed("cat")
    assert np.array_equal(llm.embed(CAT_TOKENS), expected)
    assert np.array_equal(llm.embed(np.array(CAT_TOKENS)), expected)
    assert np.array_equal(llm.embed([CAT_TOKENS, "cat"]), [expected, expected])


def test_no_inputs_give_no_outputs(llm: LLM, classifier: LLM) -> None:
    assert llm.embed([]).shape == (0, HIDDEN)
    assert llm.embed([], dimensions=8).shape == (0, 8)
    assert llm.encode([]) == []
    assert llm.score("cat", []).shape == (0,)
    assert llm.rerank("cat", []) == []
    assert classifier.classify([]) == []


def test_options_of_embed_change_the_vectors_and_invalid_inputs_are_refused(llm: LLM) -> None:
    full_vector = llm.embed("cat", normalize=False)
    assert np.linalg.norm(full_vector) != pytest.approx(1)
    truncated_vector = llm.embed("cat", dimensions=8)
    np.testing.assert_allclose(truncated_vector, full_vector[:8] / np.linalg.norm(full_vector[:8]), atol=1e-6)
    with pytest.raises(InputError, match="dimensions must be one of 8, 32, was 7"):
        llm.embed("cat", dimensions=7)
    assert np.array_equal(llm.embed("cat", prompt_name="query"), llm.embed("query: cat"))
    assert np.array_equal(llm.embed("cat", prompt="the "), llm.embed("the cat"))
    cls_vector = llm.embed("cat sat", pooling="cls", normalize=False)
    assert not np.allclose(cls_vector, llm.embed("cat sat", normalize=False))
    long_text = "cat " * 100
    assert llm.embed(long_text, truncate=True).shape == (HIDDEN,)
    with pytest.raises(PromptTooLongError, match="102 tokens, but the maximum length is 64"):
        llm.embed(long_text)


def test_encode_returns_only_the_requested_outputs(llm: LLM) -> None:
    [response] = llm.encode("the cat", outputs=("dense", "multi_vector"))
    assert np.array_equal(response.embeddings, llm.embed("the cat"))
    assert response.multi_vector is not None
    assert response.multi_vector.shape == (4, HIDDEN)
    assert response.scores is None
    assert response.sparse is None
    assert np.array_equal(llm.encode("the cat")[0].embeddings, response.embeddings)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (["cat", ""], {}, "the input is empty"),
        (["cat", [999]], {}, "token 0 of the prompt is 999"),
        (["cat", "cat " * 100], {}, "102 tokens"),
        (["cat", "cat"], {"adapter": [None, "absent"]}, "the adapter 'absent'.*without LoRA adapters"),
    ],
)
def test_an_error_names_its_input_and_leaves_no_state(
    llm: LLM, inputs: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PenstockError, match=message) as caught:
        llm.embed(inputs, **options)
    assert caught.value.__notes__ == ["in input 2 of 2"]
    assert not llm._scheduler.has_work
    assert llm.embed("cat").shape == (HIDDEN,)


def test_an_error_frees_the_slots_of_adapters(tmp_path: Path) -> None:
    model = write_tiny_embedder(tmp_path / "model")
    adapters = [write_tiny_adapter(tmp_path / name, seed) for seed, name in enumerate("ab")]
    lora = [f"{path.name}={path}" for path in adapters]
    with LLM(str(model), lora=lora, max_loras=1) as llm:
        with pytest.raises(InputError, match="the input is empty"):
            llm.embed(["cat", ""], adapter="a")
        plain_vector, first_vector, second_vector = llm.embed(["cat"] * 3, adapter=[None, "a", "b"])
        assert not np.allclose(plain_vector, first_vector, atol=1e-3)
        assert not np.allclose(first_vector, second_vector, atol=1e-3)
        assert np.array_equal(llm.embed("cat", adapter="b"), second_vector)


def test_a_list_of_adapters_with_another_length_than_the_inputs_is_refused(llm: LLM) -> None:
    with pytest.raises(InputError, match="adapter"):
        llm.embed(["cat", "dog"], adapter=["a"])


def test_similarities_use_the_prompts_of_the_checkpoint(llm: LLM) -> None:
    scores = llm.score("cat", TEXTS)
    query = llm.embed("query: cat")
    expected = llm.embed([f"passage: {text}" for text in TEXTS]) @ query
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert llm.score("cat", TEXTS[0]).shape == (1,)
    pairwise_scores = llm.score(["cat", "dog", "cat"], TEXTS)
    np.testing.assert_allclose(pairwise_scores[[0, 2]], scores[[0, 2]], atol=1e-6)
    with pytest.raises(InputError, match="2 queries and 3 documents: give one query, or one for each"):
        llm.score(["cat", "dog"], TEXTS)
    with pytest.raises(UnsupportedFeatureError, match=r"activation.*embedder"):
        llm.score("cat", TEXTS, activation=False)


@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
def test_scores_use_the_similarity_function_of_the_checkpoint(tmp_path: Path, similarity: str) -> None:
    settings = {"similarity_fn_name": similarity}
    modules = ("Transformer", "Pooling")
    with LLM(str(write_tiny_embedder(tmp_path, settings=settings, modules=modules))) as llm:
        [query, text] = llm.embed(["cat", "dog"])
        expected = query @ text if similarity == "dot" else -np.linalg.norm(query - text)
        assert llm.score("cat", "dog") == pytest.approx([expected], rel=1e-5)


def test_scores_of_a_cross_encoder_are_the_sigmoid_of_its_logits(reranker: LLM) -> None:
    scores = reranker.score("cat", TEXTS)
    assert scores.shape == (3,)
    logits = reranker.score("cat", TEXTS, activation=False)
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), atol=1e-6)
    for text, score in zip(TEXTS, scores, strict=True):
        assert reranker.score("cat", text) == pytest.approx([score], abs=1e-6)
    [swapped_score] = reranker.score(TEXTS[0], "cat")
    assert swapped_score != pytest.approx(scores[0], abs=1e-4), "the order of query and document matters"


def test_rerank_sorts_documents_by_score(reranker: LLM, llm: LLM) -> None:
    for model in (reranker, llm):
        scores = model.score("cat", TEXTS)
        results = model.rerank("cat", TEXTS)
        assert [result.score for result in results] == sorted(
            (float(score) for score in scores), reverse=True
        )
        assert all(TEXTS[result.index] == result.document for result in results)
        assert all(scores[result.index] == pytest.approx(result.score) for result in results)
        assert model.rerank("cat", TEXTS, top_n=2) == results[:2]
        with pytest.raises(InputError, match="top_n must be at least 1, was 0"):
            model.rerank("cat", TEXTS, top_n=0)


def test_classify_returns_probabilities_of_the_labels(classifier: LLM, llm: LLM) -> None:
    results = classifier.classify(TEXTS)
    for result in results:
        assert result.scores.sum() == pytest.approx(1)
        assert result.label == f"label {result.scores.argmax()}"
    [logits] = classifier.classify(TEXTS[0], activation=False)
    exponents = np.exp(logits.scores)
    np.testing.assert_allclose(results[0].scores, exponents / exponents.sum(), atol=1e-6)
    with pytest.raises(UnsupportedFeatureError, match="the output scores"):
        llm.classify("cat")
    with pytest.raises(InputError, match=r"the model has 3 labels, but a cross-encoder has one"):
        classifier.score("cat", "dog")


def test_methods_of_another_task_are_refused(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(TaskMismatchError, match=r"LLM\.generate needs a model of the task text-generation"):
        llm.generate("cat")
    with LLM(str(write_tiny_llm(tmp_path))) as decoder:
        calls: list[tuple[str, tuple[Any, ...]]] = [
            ("embed", ("cat",)),
            ("encode", ("cat",)),
            ("score", ("cat", ["dog"])),
            ("rerank", ("cat", ["dog"])),
            ("classify", ("cat",)),
        ]
        for name, arguments in calls:
            with pytest.raises(TaskMismatchError, match="needs a model of the task embeddings-generation"):
                getattr(decoder, name)(*arguments)


def test_a_closed_llm_refuses_calls(tmp_path: Path) -> None:
    llm = LLM(str(write_tiny_embedder(tmp_path)))
    llm.close()
    with pytest.raises(InputError, match="this LLM is closed"):
        llm.embed("cat")


def test_the_progress_bar_counts_inputs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.embed(TEXTS)
    assert "3/3" in capsys.readouterr().err
    llm.embed(TEXTS, use_tqdm=False)
    assert not capsys.readouterr().err
