"""Routes for reranking, scores, classes and raw scores, with tiny encoders and a real worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.embedding_server import embedder_config, embedding_server
from support.in_process_server import InProcessServer

from penstock import LLM

QUERY = "a red car"
TEXTS = ["the cat sat on the mat", "a big red car", "hello world", "the dog ran"]


async def post_ok(server: InProcessServer, path: str, **body: Any) -> Any:
    """Send a request and return its response, which must be successful."""
    response = await server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("model_kind", ["embedder", "cross_encoder"])
async def test_rerank_and_score_equal_the_library(model_kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(model_kind)
    expected = LLM.from_config(embedder_config(folder)).score(QUERY, TEXTS, False)
    order = [int(i) for i in np.argsort(-expected, kind="stable")]
    async with embedding_server(folder) as server:
        for path, version in (("/v1/rerank", "1"), ("/rerank", "1"), ("/v2/rerank", "2")):
            answer = await post_ok(server, path, query=QUERY, documents=TEXTS, model="tiny")
            assert [result["index"] for result in answer["results"]] == order
            scores = [result["relevance_score"] for result in answer["results"]]
            np.testing.assert_allclose(scores, expected[order], atol=1e-6)
            assert "document" not in answer["results"][0]
            assert answer["meta"]["api_version"] == {"version": version}
            assert (answer["model"], answer["id"][:7]) == ("tiny", "rerank-")
            assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] > 20
        objects = [{"text": text} if i % 2 else text for i, text in enumerate(TEXTS)]
        best_response = await post_ok(
            server, "/v1/rerank", query=QUERY, documents=objects, top_n=2, return_documents=True
        )
        assert [result["document"] for result in best_response["results"]] == [
            {"text": TEXTS[i]} for i in order[:2]
        ]
        for path in ("/v1/score", "/score"):
            answer = await post_ok(server, path, text_1=QUERY, text_2=TEXTS)
            np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, atol=1e-6)
            assert [(item["index"], item["object"]) for item in answer["data"]] == [
                (i, "score") for i in range(4)
            ]
        pairs_response = await post_ok(
            server, "/v1/score", text_1=[QUERY, TEXTS[0]], text_2=[TEXTS[2], TEXTS[0]]
        )
        assert pairs_response["data"][0]["score"] == pytest.approx(float(expected[2]), abs=1e-6)
        [item] = (await post_ok(server, "/v1/score", text_1=[QUERY], text_2=TEXTS[1]))["data"]
        assert item["score"] == pytest.approx(float(expected[1]), abs=1e-6)


async def test_an_embedder_counts_the_tokens_of_the_query_once(embedder: Path) -> None:
    async with embedding_server(embedder) as server:
        tokenizer = server.services.tokenizer
        texts = [f"query: {QUERY}", *(f"passage: {text}" for text in TEXTS)]
        answer = await post_ok(server, "/v1/rerank", query=QUERY, documents=TEXTS)
        assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.encode_text(text)) for text in texts)


async def test_raw_scores_of_a_cross_encoder_are_logits(cross_encoder: Path) -> None:
    async with embedding_server(cross_encoder) as server:
        scores = await post_ok(server, "/v1/score", text_1=QUERY, text_2=TEXTS)
        logits = await post_ok(server, "/v1/score", text_1=QUERY, text_2=TEXTS, activation=False)
        raw_scores = np.array([item["score"] for item in logits["data"]])
        expected = [item["score"] for item in scores["data"]]
        np.testing.assert_allclose(1 / (1 + np.exp(-raw_scores)), expected, atol=1e-6)


async def test_long_documents_are_truncated_or_refused(cross_encoder: Path) -> None:
    async with embedding_server(cross_encoder) as server:
        documents = ["hello world", "cat " * 80]
        error = await server.expect_refusal("/v1/rerank", model="tiny", query="a cat", documents=documents)
        assert (error["param"], error["code"]) == ("documents[1]", "context_length_exceeded")
        assert error["message"].startswith("documents[1] has 85 tokens, but the maximum length is 64")
        truncated_response = await post_ok(
            server, "/v1/rerank", query="a cat", documents=documents, truncate=True
        )
        assert truncated_response["usage"]["prompt_tokens"] == 7 + 64
        shortened_response = await post_ok(
            server, "/v1/rerank", query="a cat", documents=documents, max_tokens_per_doc=6
        )
        assert shortened_response["usage"]["prompt_tokens"] == 7 + 5 + 6
        expected = await post_ok(server, "/v1/rerank", query="a cat", documents=["hello world", "cat " * 6])
        assert shortened_response["results"] == expected["results"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/rerank", {"query": "a"}, "documents", "documents is required"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "is an empty list"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 6}, "documents", "6 entries, but a request may"),
        ("/v1/rerank", {"query": "a", "documents": ["a", 1]}, "documents[1]", "documents[1]: "),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"text": "b", "x": 1}]}, "documents[1].x", ""),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "greater than or equal to 1"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields", "only"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]", "documents[1]: the input"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query", "query: the input is empty"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "activation": False}, "activation", "embedder"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_1", "2 texts, but text_2 has 3"),
        ("/v1/score", {"text_1": [], "text_2": ["a"]}, "text_1", "text_1 is an empty list"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "text_2 is an empty list"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]", "the input is empty"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"] * 6}, "text_2", "6 entries, but a request may"),
        ("/v1/classify", {"input": "a"}, None, "this model computes dense, multi_vector"),
    ],
    ids=str,
)  # fmt: skip
async def test_invalid_fields_are_refused(
    embedder: Path, path: str, body: dict[str, Any], param: Any, message: str
) -> None:
    async with embedding_server(embedder, max_inputs_per_request=5) as server:
        error = await server.expect_refusal(path, model="tiny", **body)
        assert error["param"] == param
        assert message in error["message"]


async def test_classify_equals_the_library(classifier: Path) -> None:
    expected = LLM.from_config(embedder_config(classifier)).classify(TEXTS, False)
    async with embedding_server(classifier) as server:
        for path in ("/v1/classify", "/classify"):
            answer = await post_ok(server, path, input=TEXTS)
            for i, (item, result) in enumerate(zip(answer["data"], expected, strict=True)):
                assert (item["index"], item["label"], item["num_classes"]) == (i, result.label, 3)
                np.testing.assert_allclose(item["probs"], result.scores, atol=1e-6)
        [single_response] = (await post_ok(server, "/v1/classify", input=TEXTS[1], activation=False))["data"]
        assert abs(sum(single_response["probs"]) - 1) > 0.01
        ids = server.services.tokenizer.encode_text(TEXTS[1]).tolist()
        [ids_response] = (await post_ok(server, "/v1/classify", input=ids, activation=False))["data"]
        assert ids_response == single_response
        error = await server.expect_refusal("/v1/rerank", model="tiny", query="a", documents=["b"])
        assert "the model has 3 labels, but a cross-encoder has one" in error["message"]
        [raw_item] = (await post_ok(server, "/pooling", input=TEXTS[1], activation=False))["data"]
        np.testing.assert_allclose(raw_item["scores"], single_response["probs"], atol=1e-6)
