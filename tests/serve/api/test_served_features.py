"""Adapters and speculative decoding over HTTP, with the demo model and a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.in_process_server import InProcessServer, parse_events, run_in_process, user_message

import penstock
from penstock.assembly import load_runtime, load_tokenizer
from penstock.config import PipelineConfig

DEMO = Path(penstock.__file__).parent / "demo"
STORY = [user_message("Tell me a story about a dragon. Tell me a story about a dragon.")]


@asynccontextmanager
async def serve_demo(**fields: Any) -> AsyncIterator[InProcessServer]:
    config = PipelineConfig.from_flat(
        {
            "model_path": "demo",
            "kv_cache_memory": 32 * 2**20,
            "max_length": 1024,
            "deterministic": True,
            "quantization_encoding": "float32",
            **fields,
        }
    )
    tokenizer = load_tokenizer(config)
    make_runtime = partial(load_runtime, config)
    async with run_in_process(
        make_runtime=make_runtime, tokenizer=tokenizer, pipeline_config=config
    ) as server:
        tokenizer.max_length = server.services.worker.info.max_length
        yield server


async def complete_text(server: InProcessServer, **body: Any) -> str:
    response = await server.post(
        "/v1/chat/completions", **{"messages": STORY, "seed": 1, "temperature": 0, "max_tokens": 40, **body}
    )
    assert response.status_code == 200, response.text
    content = response.json()["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    pytest.importorskip("peft")
    from support.adapters import write_adapter

    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(DEMO, folder / str(seed), seed) for seed in range(2)]


async def test_requests_with_adapters_run_concurrently_and_keep_an_unloaded_adapter(
    adapters: list[Path],
) -> None:
    async with serve_demo(lora=[f"first={adapters[0]}"], enable_lora=True) as server:

        async def list_models() -> list[str]:
            return [item["id"] for item in (await server.http.get("/v1/models")).json()["data"]]

        assert await list_models() == ["demo", "first"]
        plain_text, first_text = await complete_text(server), await complete_text(server, model="first")
        assert plain_text != first_text
        load_body = {"lora_name": "second", "lora_path": str(adapters[1])}
        assert (await server.http.post("/v1/load_lora_adapter", json=load_body)).status_code == 200
        assert await list_models() == ["demo", "first", "second"]
        # Concurrent requests return the texts that the requests return one after another.
        second_text = await complete_text(server, model="second")
        assert second_text not in (plain_text, first_text)
        concurrent_texts = await asyncio.gather(
            complete_text(server),
            complete_text(server, model="first"),
            complete_text(server, model="second"),
        )
        assert concurrent_texts == [plain_text, first_text, second_text]

        # A running request keeps its adapter after the adapter is unloaded.
        body = {"messages": STORY, "seed": 1, "temperature": 0, "max_tokens": 400, "ignore_eos": True}
        expected = await complete_text(server, model="second", **body)
        running_task = asyncio.create_task(
            server.post("/v1/chat/completions", model="second", stream=True, **body)
        )
        while server.services.worker.stats.num_running == 0 and not running_task.done():
            await asyncio.sleep(0)
        unload_body = {"lora_name": "second"}
        assert (await server.http.post("/v1/unload_lora_adapter", json=unload_body)).status_code == 200
        assert await list_models() == ["demo", "first"]
        unloaded_response = await server.post("/v1/chat/completions", model="second", messages=STORY)
        assert (unloaded_response.status_code, unloaded_response.json()["error"]["code"]) == (
            404,
            "model_not_found",
        )
        chunks = parse_events((await running_task).text)
        assert chunks[-1] == "[DONE]"
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
        assert text == expected
        assert await complete_text(server) == plain_text


BODIES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.3, "seed": 3},
    {"response_format": {"type": "json_object"}, "temperature": 1.0, "seed": 4},
]


async def test_speculative_decoding_does_not_change_outputs() -> None:
    async def complete_all(**fields: Any) -> list[str]:
        async with serve_demo(**fields) as server:
            texts = await asyncio.gather(*(complete_text(server, **body) for body in BODIES))
            single_texts = [await complete_text(server, **body) for body in BODIES]
            assert single_texts == texts
            draft_counts.append(server.services.worker.stats.num_draft_tokens)
            return texts

    draft_counts: list[int] = []
    plain_texts = await complete_all()
    assert await complete_all(speculative_method="ngram", adaptive_speculation=False) == plain_texts
    assert draft_counts[0] == 0
    assert draft_counts[1] > 0
