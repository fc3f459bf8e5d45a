"""``/v1/embeddings`` and ``/pooling`` with a tiny encoder and a real worker."""

from __future__ import annotations

import base64
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.embedding_server import embedder_config, embedding_server
from support.in_process_server import InProcessServer, run_in_process
from support.tiny_embedder import write_tiny_embedder

from penstock import LLM
from penstock.text.embeddings_tokenizer import EmbeddingsTokenizer

TEXTS = ["the cat sat on the mat", "a big red car", "hello world"]


async def request_embeddings(server: InProcessServer, **body: Any) -> Any:
    """Send a request and return its response, which must be successful."""
    response = await server.http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def read_vectors(answer: Any) -> np.ndarray:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return np.array([item["embedding"] for item in answer["data"]], np.float32)


@pytest.fixture(scope="module")
def library_vectors(embedder: Path) -> dict[str, np.ndarray]:
    """Return the vectors of `LLM.embed` for each set of options."""
    llm = LLM.from_config(embedder_config(embedder))
    options_by_name: dict[str, dict[str, Any]] = {
        "plain": {},
        "query": {"prompt_name": "query"},
        "document": {"prompt_name": "document"},
        "cls": {"pooling": "cls"},
        "raw": {"normalize": False},
        "short": {"dimensions": 8},
    }
    vectors_by_option = {
        name: llm.embed(TEXTS, False, **options) for name, options in options_by_name.items()
    }
    assert len({vector.tobytes() for vector in vectors_by_option.values()}) == len(options_by_name)
    return vectors_by_option


async def test_each_input_format_gives_the_vectors_of_the_library(
    embedder: Path, library_vectors: dict[str, np.ndarray]
) -> None:
    async with embedding_server(embedder) as server:
        answer = await request_embeddings(server, input=TEXTS)
        assert (answer["object"], answer["model"], answer["data"][0]["object"]) == (
            "list",
            "tiny",
            "embedding",
        )
        np.testing.assert_allclose(read_vectors(answer), library_vectors["plain"], atol=1e-6)
        ids = [server.services.tokenizer.encode_text(text).tolist() for text in TEXTS]
        num_tokens = sum(map(len, ids))
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert (
            read_vectors(await request_embeddings(server, input=ids)).tobytes()
            == read_vectors(answer).tobytes()
        )
        for single_input in (TEXTS[1], ids[1]):
            single_response = await request_embeddings(server, input=single_input, model="tiny", user="ann")
            np.testing.assert_allclose(
                read_vectors(single_response), library_vectors["plain"][1:2], atol=1e-6
            )
            assert single_response["usage"]["prompt_tokens"] == len(ids[1])


async def test_the_texts_of_a_request_are_encoded_together(
    embedder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_sizes: list[int] = []
    encode = EmbeddingsTokenizer._encode_batch

    def record_batch_size(self: EmbeddingsTokenizer, samples: Any, cut_to: int | None) -> Any:
        batch_sizes.append(len(samples))
        return encode(self, samples, cut_to)

    async with embedding_server(embedder) as server:
        monkeypatch.setattr(EmbeddingsTokenizer, "_encode_batch", record_batch_size)
        await request_embeddings(server, input=TEXTS)
        assert batch_sizes == [len(TEXTS)]


async def test_each_option_gives_the_vectors_of_the_library(
    embedder: Path, library_vectors: dict[str, np.ndarray]
) -> None:
    async with embedding_server(embedder) as server:
        fields_by_name: dict[str, dict[str, Any]] = {
            "query": {"input_type": "query"},
            "document": {"input_type": "passage"},
            "cls": {"pooling": "cls"},
            "raw": {"normalize": False},
            "short": {"dimensions": 8},
        }
        for name, body in fields_by_name.items():
            answer = await request_embeddings(server, input=TEXTS, **body)
            np.testing.assert_allclose(read_vectors(answer), library_vectors[name], atol=1e-6, err_msg=name)
        prompt_name_vectors = read_vectors(await request_embeddings(server, input=TEXTS, prompt_name="query"))
        np.testing.assert_allclose(prompt_name_vectors, library_vectors["query"], atol=1e-6)
        assert read_vectors(await request_embeddings(server, input=TEXTS, dimensions=32)).shape == (3, 32)


async def test_base64_vectors_equal_float_vectors(embedder: Path) -> None:
    async with embedding_server(embedder) as server:
        plain_vectors = read_vectors(await request_embeddings(server, input=TEXTS, encoding_format="float"))
        base64_items = (await request_embeddings(server, input=TEXTS, encoding_format="base64"))["data"]
        for row, item in zip(plain_vectors, base64_items, strict=True):
            assert np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tobytes() == row.tobytes()


async def test_shortened_vectors_are_normalized_by_default_except_in_pooling(tmp_path: Path) -> None:
    folder = write_tiny_embedder(tmp_path / "m", modules=("Transformer", "Pooling"), is_matryoshka=True)
    async with embedding_server(folder) as server:
        full_vector = read_vectors(await request_embeddings(server, input="a cat"))[0]
        assert abs(np.linalg.norm(full_vector) - 1) > 0.01
        shortened_vector = read_vectors(await request_embeddings(server, input="a cat", dimensions=5))[0]
        np.testing.assert_allclose(
            shortened_vector, full_vector[:5] / np.linalg.norm(full_vector[:5]), atol=1e-6
        )
        raw_vector = read_vectors(
            await request_embeddings(server, input="a cat", dimensions=5, normalize=False)
        )[0]
        np.testing.assert_allclose(raw_vector, full_vector[:5], atol=1e-6)
        [pooled_item] = (await server.http.post("/pooling", json={"input": "a cat", "dimensions": 5})).json()[
            "data"
        ]
        np.testing.assert_allclose(pooled_item["dense"], full_vector[:5], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input is required"),
        ({"input": ""}, "input", "the input is empty"),
        ({"input": []}, "input", "input is an empty list"),
        ({"input": ["a", ""]}, "input[1]", "input[1]: the input is empty"),
        ({"input": [[1, 5, 2], []]}, "input[1]", "input[1]: "),
        ({"input": [5, 99999]}, "input", "99999"),
        ({"input": 7}, "input", "input: "),
        ({"input": [["a"]]}, "input[0][0]", "valid integer"),
        ({"input": {"text": "a"}}, "input", "input: "),
        ({"input": "a", "dimensions": 9}, "dimensions", "must be one of 8, 16, 32, was 9"),
        ({"input": "a", "dimensions": 33}, "dimensions", "must be one of 8, 16, 32, was 33"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "pooling": "sum"}, "pooling", "pooling: "),
        (
            {"input": "a", "prompt_name": "title"},
            "input",
            "'title' is unknown: the checkpoint has query, docu",
        ),
        (
            {"input": "a", "input_type": "query", "prompt_name": "query"},
            "input_type",
            "send only one of them",
        ),
        ({"input": [5], "prompt_name": "query"}, "input", "a prompt needs a text"),
        ({"input": ["a"] * 6}, "input", "input has 6 entries, but a request may have 5"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "send at least 1"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown field"),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens", "not supported (only true)"),
    ],
    ids=str,
)
async def test_invalid_fields_are_refused(
    embedder: Path, body: dict[str, Any], param: str, message: str
) -> None:
    async with embedding_server(embedder, max_inputs_per_request=5) as server:
        response = await server.http.post("/v1/embeddings", json=body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert message in error["message"]
        assert server.services.worker.num_outstanding == 0


async def test_long_inputs_are_refused_without_truncation(embedder: Path) -> None:
    async with embedding_server(embedder) as server:
        long_input = "cat " * 70  # longer than the 64 positions of the model
        for input_value, param in (
            (long_input, "input"),
            (["a", long_input], "input[1]"),
            ([5] * 70, "input"),
        ):
            error = await server.expect_refusal("/v1/embeddings", model="tiny", input=input_value)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert error["message"].startswith(f"{param} has 7")
            assert "but the maximum length is 64 tokens: shorten the input" in error["message"]
        huge_input_error = await server.expect_refusal("/v1/embeddings", model="tiny", input="cat " * 100_000)
        assert "has more than " in huge_input_error["message"]
        full_response = await request_embeddings(server, input="cat " * 62)
        assert full_response["usage"]["prompt_tokens"] == 64
        for body in ({"truncate": True}, {"truncate": "END"}, {"truncate_prompt_tokens": -1}):
            truncated_response = await request_embeddings(server, input=long_input, **body)
            assert truncated_response["usage"]["prompt_tokens"] == 64
            assert read_vectors(truncated_response).tobytes() == read_vectors(full_response).tobytes()
        shortened_response = await request_embeddings(
            server, input=[long_input, "a"], truncate_prompt_tokens=12
        )
        assert shortened_response["usage"]["prompt_tokens"] == 12 + 3
        expected_vectors = read_vectors(await request_embeddings(server, input="cat " * 10))
        np.testing.assert_allclose(read_vectors(shortened_response)[:1], expected_vectors, atol=1e-6)
        await server.expect_refusal("/v1/embeddings", model="tiny", input=long_input, truncate="NONE")


async def test_pooling_returns_all_requested_outputs(embedder: Path) -> None:
    async with embedding_server(embedder) as server:

        async def request_pooling(**body: Any) -> Any:
            response = await server.http.post("/pooling", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        answer = await request_pooling(input=TEXTS, outputs=["dense", "multi_vector"])
        dense_vectors = read_vectors(await request_embeddings(server, input=TEXTS))
        ids = [server.services.tokenizer.encode_text(text).tolist() for text in TEXTS]
        for i, item in enumerate(answer["data"]):
            assert (item["object"], item["index"], len(item)) == ("pooling", i, 4)
            np.testing.assert_allclose(item["dense"], dense_vectors[i], atol=1e-6)
            assert np.shape(item["multi_vector"]) == (len(ids[i]), 32)
            np.testing.assert_allclose(np.linalg.norm(item["multi_vector"], axis=1), 1, atol=1e-5)
        base64_items = await request_pooling(
            input=TEXTS[0], outputs=["multi_vector"], encoding_format="base64"
        )
        rows = [
            np.frombuffer(base64.b64decode(row), "<f4") for row in base64_items["data"][0]["multi_vector"]
        ]
        np.testing.assert_allclose(rows, answer["data"][0]["multi_vector"], atol=1e-6)
        assert list((await request_pooling(input="a"))["data"][0]) == ["object", "index", "dense"]
        error = await server.expect_refusal("/pooling", model="tiny", input="a", outputs=["sparse"])
        assert error["message"] == (
            "the output sparse is not supported: this model computes dense, multi_vector"
        )


async def test_routes_of_other_tasks_are_refused(classifier: Path) -> None:
    async with embedding_server(classifier) as server:
        error = await server.expect_refusal("/v1/embeddings", model="tiny", input="a")
        assert error["code"] == "unsupported_value"
        assert "this model computes scores: send the request to /v1/rerank" in error["message"]
        assert (
            await server.http.post("/v1/embeddings", json={"input": "a", "model": "x"})
        ).status_code == 404
    paths = "/v1/embeddings /pooling /v1/rerank /v2/rerank /rerank /v1/score /score /v1/classify /classify"
    async with run_in_process() as server:
        for path in paths.split():
            error = await server.expect_refusal(path, input="a")
            assert error["code"] == "unsupported_task"
            assert error["message"].startswith(f"{path} needs a model of the task embeddings-generation")


async def test_the_model_list_has_the_task_and_the_log_and_metrics_describe_requests(
    embedder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with embedding_server(embedder) as server:
        (model,) = (await server.http.get("/v1/models")).json()["data"]
        assert (model["task"], model["outputs"]) == ("embeddings-generation", ["dense", "multi_vector"])
        with caplog.at_level(logging.INFO, "penstock"):
            answer = await request_embeddings(server, input=TEXTS, user="ann")
        log_records = [record for record in caplog.records if record.message == "request"]
        log_fields = log_records[-1].fields  # type: ignore[attr-defined]
        num_tokens = answer["usage"]["prompt_tokens"]
        assert (log_fields["inputs"], log_fields["prompt_tokens"], log_fields["user"]) == (
            3,
            num_tokens,
            "ann",
        )
        assert (log_fields["first_token_s"], log_fields["queue_s"] is None) == (None, False)
        metrics = server.services.metrics.render().decode()
        assert f"penstock_prompt_tokens_total {float(num_tokens)}" in metrics
        assert "penstock_time_to_first_token_seconds_count 0.0" in metrics
        assert 'penstock_request_seconds_count{route="/v1/embeddings"} 1.0' in metrics


async def test_the_openai_client_reads_base64_and_floats(
    embedder: Path, library_vectors: dict[str, np.ndarray]
) -> None:
    async with embedding_server(embedder) as server:
        # The default of the client is base64.
        encoding_options: tuple[Any, Any] = ({}, {"encoding_format": "float"})
        for options in encoding_options:
            answer = await server.openai.embeddings.create(model="tiny", input=TEXTS, **options)
            rows = np.array([item.embedding for item in answer.data])
            np.testing.assert_allclose(rows, library_vectors["plain"], atol=1e-6)
            assert answer.usage.total_tokens > 9
        shortened_response = await server.openai.embeddings.create(
            model="tiny", input=TEXTS, dimensions=8, extra_body={"input_type": "query"}
        )
        assert {len(item.embedding) for item in shortened_response.data} == {8}
