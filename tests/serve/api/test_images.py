"""Images in chat completions, Responses, Messages and Ollama requests, also with the official clients."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError
from support.embedding_server import embedding_server
from support.in_process_server import InProcessServer
from support.vision_checkpoint import encode_image_file, image_chat, random_picture, write_llava

from penstock import LLM
from penstock.pipelines.core import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


@asynccontextmanager
async def open_vision_server(folder: Path, **fields: Any) -> AsyncIterator[InProcessServer]:
    async with embedding_server(folder, kv_cache_block_size=16, max_batch_size=4, **fields) as server:
        yield server
        server.services.images.close()


def make_image_url(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(encode_image_file(random_picture(seed))).decode()


def make_message(text: str, *urls: str, **image_fields: Any) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url, **image_fields}} for url in urls]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


async def test_chat_completions_read_images(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encode_image_file(random_picture(1)))
    with LLM(folder, quantization_encoding="float32", max_batch_size=4) as llm:
        params = SamplingParams(max_new_tokens=8, top_k=1, ignore_eos=True)
        expected = llm.chat(
            image_chat("What?", [random_picture(1), random_picture(2)]), params, use_tqdm=False
        )[0]
    async with open_vision_server(folder, image_dir=str(tmp_path)) as server:
        client = AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=server.http, max_retries=0
        )
        body: Any = {
            "model": "tiny",
            "messages": [make_message("What?", make_image_url(1), make_image_url(2))],
            "max_tokens": 8,
            "temperature": 0,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
        }
        answers = [await client.chat.completions.create(**body) for _ in range(2)]
        num_prompt_tokens = len(expected.prompt_token_ids)
        for answer in answers:
            assert answer.choices[0].message.content == expected.text
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == num_prompt_tokens
        details = answers[1].usage.prompt_tokens_details if answers[1].usage is not None else None
        assert details is not None
        assert details.cached_tokens == 48
        stream = await client.chat.completions.create(**body, stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(texts) == expected.text
        body["messages"] = [make_message("What?", "file:///a.png", make_image_url(2))]
        local_response = await client.chat.completions.create(**body)
        assert local_response.choices[0].message.content == expected.text
        await check_prompt_tokens(server, expected.prompt_token_ids)
        await check_errors(server, client)
        metrics = (await server.http.get("/metrics")).text
        assert "penstock_image_preparation_seconds_count" in metrics
        assert server.services.images._num_active == 0


async def check_prompt_tokens(server: InProcessServer, ids: list[int]) -> None:
    """Check that `/tokenize` and `/v1/chat/completions/render` return ``ids``, with the tokens of images."""
    body = {"model": "tiny", "messages": [make_message("What?", make_image_url(1), make_image_url(2))]}
    tokenized = (await server.http.post("/tokenize", json=body)).json()
    assert tokenized["tokens"] == ids
    rendered_response = (await server.http.post("/v1/chat/completions/render", json=body)).json()
    assert rendered_response["prompt_token_ids"] == ids
    assert rendered_response["prompt"].count("<image>") == 32


async def check_errors(server: InProcessServer, client: AsyncOpenAI) -> None:
    truncated_image = (
        "data:image/png;base64," + base64.b64encode(encode_image_file(random_picture(1))[:100]).decode()
    )
    messages_and_errors: list[tuple[dict[str, Any], str]] = [
        (make_message("?", truncated_image), "the image cannot be decoded"),
        (
            make_message("?", "https://example.org/a.png"),
            r"messages\[0\].content\[0\]: this server does not fetch",
        ),
        (make_message("?", make_image_url(1), detail="high"), "detail 'high' is not supported"),
        (make_message("?", *[make_image_url(1)] * 16), r"27\d.*256"),
        (make_message("?", *["data:,"] * 33), "has 33 images, but the limit is 32"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "requires the field image_url"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "reads text and images only"),
    ]
    for message, error_text in messages_and_errors:
        with pytest.raises(BadRequestError, match=error_text):
            await client.chat.completions.create(model="tiny", messages=[message])  # type: ignore[list-item]


async def test_the_ollama_route_reads_images(folder: Path) -> None:
    """Ollama's chat route returns the same text as chat completions."""
    async with open_vision_server(folder) as server:
        body = {
            "model": "tiny",
            "messages": [make_message("What?", make_image_url(1))],
            "max_tokens": 8,
            "temperature": 0,
        }
        expected = (await server.http.post("/v1/chat/completions", json=body)).json()
        texts = []
        for seed in (1, 2):
            image = base64.b64encode(encode_image_file(random_picture(seed))).decode()
            ollama_message = {"role": "user", "content": "What?", "images": [image]}
            options = {"num_predict": 8, "temperature": 0}
            body = {"model": "tiny", "messages": [ollama_message], "stream": False, "options": options}
            texts.append((await server.http.post("/api/chat", json=body)).json()["message"]["content"])
        assert texts[0] == expected["choices"][0]["message"]["content"] != texts[1]
        assert (
            "vision" in (await server.http.post("/api/show", json={"model": "tiny"})).json()["capabilities"]
        )


async def test_responses_and_messages_read_images(folder: Path) -> None:
    """The Responses and the Messages API return the same text as chat completions."""
    anthropic: Any = pytest.importorskip("anthropic", reason="needs the package anthropic")
    httpx2: Any = pytest.importorskip("httpx2", reason="needs httpx2, which anthropic uses")
    async with open_vision_server(folder) as server:
        openai = AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=server.http, max_retries=0
        )
        expected = await openai.chat.completions.create(
            model="tiny", messages=[make_message("What?", make_image_url(1))], max_tokens=8, temperature=0
        )
        other_image_response = await openai.chat.completions.create(
            model="tiny", messages=[make_message("What?", make_image_url(2))], max_tokens=8, temperature=0
        )
        text = expected.choices[0].message.content
        assert text
        assert text != other_image_response.choices[0].message.content
        assert expected.usage is not None
        content_parts: Any = [
            {"type": "input_image", "image_url": make_image_url(1), "detail": "auto"},
            {"type": "input_text", "text": "What?"},
        ]
        fields: Any = {
            "model": "tiny",
            "input": [{"role": "user", "content": content_parts}],
            "max_output_tokens": 8,
            "temperature": 0,
        }
        response = await openai.responses.create(**fields)
        assert response.output_text == text
        assert response.usage is not None
        assert response.usage.input_tokens == expected.usage.prompt_tokens
        stream = await openai.responses.create(**fields, stream=True)
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == text
        content_parts[0] = {"type": "input_image", "image_url": make_image_url(1), "detail": "high"}
        with pytest.raises(BadRequestError, match="detail 'high' is not supported"):
            await openai.responses.create(**fields)
        content_parts[0] = {"type": "input_image", "image_url": "https://example.org/a.png"}
        with pytest.raises(BadRequestError, match="does not fetch") as refused_error:
            await openai.responses.create(**fields)
        assert refused_error.value.param == "input"
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=server.app))
        async with anthropic.AsyncAnthropic(
            base_url="http://localhost", api_key="none", http_client=http, max_retries=0
        ) as client:
            await check_messages_api(client, text, expected.usage.prompt_tokens)


async def check_messages_api(client: Any, text: str, num_prompt_tokens: int) -> None:
    """Check image blocks of the Messages API, with base64 data and with a URL."""
    source = {"type": "base64", "media_type": "image/png", "data": make_image_url(1).partition(",")[2]}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    fields: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": blocks}],
        "max_tokens": 8,
        "extra_body": {"temperature": 0},
    }
    answer = await client.messages.create(**fields)
    assert answer.content[0].text == text
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == num_prompt_tokens
    token_count = await client.messages.count_tokens(model="tiny", messages=fields["messages"])
    assert token_count.input_tokens == num_prompt_tokens
    async with client.messages.stream(**fields) as stream:
        assert await stream.get_final_text() == text
    source["data"] = source["data"][:200]
    with pytest.raises(Exception, match="the image cannot be decoded") as refused_error:
        await client.messages.create(**fields)
    assert refused_error.value.status_code == 400
    blocks[0]["source"] = {"type": "url", "url": "https://example.org/a.png"}
    with pytest.raises(Exception, match="does not fetch"):
        await client.messages.create(**fields)
