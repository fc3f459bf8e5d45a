"""A server without sockets, with real routes, a real worker (by default in a thread) and a fake model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from openai import AsyncOpenAI
from starlette.types import ASGIApp

from penstock.config import PipelineConfig
from penstock.scheduler import Scheduler
from penstock.serve.app import create_app
from penstock.serve.config import ServeConfig
from penstock.serve.observability.metrics import Metrics
from penstock.serve.parsers import ParserFactory
from penstock.serve.services import Services
from penstock.testing import FakePipeline, FakeTokenizer
from penstock.text.tokenizer import TextTokenizer
from penstock.worker.client import WorkerClient
from penstock.worker.messages import WorkerInfo
from penstock.worker.process import WorkerRuntime

HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "<tool_call>{name, arguments}</tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for c in message.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A chat template for `FakeTokenizer` with tool calls in the Hermes format."""
THINKING = HERMES + "{# <think> </think> #}"
"""The template HERMES for a reasoning model."""


@dataclass
class InProcessServer:
    """A server without sockets, with an HTTP client and an OpenAI client."""

    http: httpx.AsyncClient
    openai: AsyncOpenAI
    services: Services
    pipeline: FakePipeline
    app: ASGIApp

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """Post a request. The model name is added if it is not in `body`."""
        return await self.http.post(path, json={"model": "demo", **body})

    async def chat(self, **body: Any) -> dict[str, Any]:
        """Return the response to a chat request. Asserts status 200."""
        response = await self.post("/v1/chat/completions", **{"messages": [user_message("Hi")], **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def complete(self, **body: Any) -> dict[str, Any]:
        """Return the response to a completion request. Asserts status 200."""
        response = await self.post("/v1/completions", **{"prompt": "Hi", **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def expect_refusal(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the error of a refused request. Asserts status 400."""
        response = await self.post(path, **body)
        assert response.status_code == 400, response.text
        error: dict[str, Any] = response.json()["error"]
        return error


def user_message(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def parse_events(text: str) -> list[Any]:
    """Return the decoded data of the events of a stream, without comments. ``[DONE]`` is a string."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


@asynccontextmanager
async def run_in_process(
    pipeline: FakePipeline | None = None,
    *,
    template: str | None = HERMES,
    tokenizer: TextTokenizer | None = None,
    pipeline_config: PipelineConfig | None = None,
    make_runtime: Any = None,
    max_batch_size: int = 8,
    grammars_enabled: bool = False,
    adapters: tuple[str, ...] = (),
    in_thread: bool = True,
    **config: Any,
) -> AsyncIterator[InProcessServer]:
    """Run a server that generates ``Hello!`` or the output of `pipeline`. `config` is for `ServeConfig`."""
    served_pipeline = pipeline if pipeline is not None else FakePipeline.saying("Hello!")
    tokenizer = tokenizer if tokenizer is not None else FakeTokenizer(template=template)

    def make_fake_runtime() -> WorkerRuntime:
        info = WorkerInfo(
            max_length=2048,
            max_batch_size=max_batch_size,
            max_batch_input_tokens=8192,
            num_blocks=1000,
            block_size=32,
            vocab_size=257,
            grammars_enabled=grammars_enabled,
            lora_enabled=bool(adapters),
            adapters=[(name, f"/adapters/{name}") for name in adapters],
        )
        return WorkerRuntime(scheduler=Scheduler(served_pipeline, max_batch_size=max_batch_size), info=info)

    worker = WorkerClient(
        make_runtime or make_fake_runtime, in_thread=in_thread, max_queue_size=config.get("max_queue_size")
    )
    await worker.start()
    services = Services(
        config=ServeConfig(**config),
        pipeline_config=pipeline_config or PipelineConfig(),
        tokenizer=tokenizer,
        worker=worker,
        metrics=Metrics(reports_process=False),
        pool=ThreadPoolExecutor(2),
        parsers=ParserFactory.choose(tokenizer.chat_template_source, "auto", "auto"),
        task=worker.info.task,
    )
    app = create_app(services)
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/") as http:
            client = AsyncOpenAI(
                base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
            )
            yield InProcessServer(http, client, services, served_pipeline, app)
    finally:
        await worker.stop(0)
        services.states.close()
        services.pool.shutdown()
        services.large_body_pool.shutdown()
        for decoder in (services.decoder, services.large_body_decoder):
            await decoder.close()
