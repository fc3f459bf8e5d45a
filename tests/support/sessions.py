"""Requests that show whether a session stays with its worker, for servers with two workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

_FILLER = "Once upon a time, far away, there was a small house beside a river. " * 8


async def stays_with_its_worker(
    client: httpx.AsyncClient, name: str, headers: Mapping[str, str] | None = None, **fields: Any
) -> bool:
    """Return whether a session ignores the prefix cache of the other worker.

    A worker computes a long prompt. While it generates for another request, the first request of the session
    goes to the other worker. Then the session asks the long prompt: its own worker has not cached it. Without
    a session, the prompt goes to the worker that has it.

    Args:
        client: the client of an idle server.
        name: a part of the prompts, so that each call has its own ones.
        headers: the headers of the session.
        fields: the fields of the session's requests.
    """
    known_prompt = f"Story {name} of the old woman. {_FILLER}"

    async def ask(prompt: str, max_tokens: int = 2, **more: Any) -> int:
        """Return how many tokens of a prompt were cached."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}
        session_headers = headers if more else None
        response = await client.post("/v1/completions", json=body, headers=session_headers)
        response.raise_for_status()
        num_cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return num_cached

    session = {"temperature": 0.0, **fields}
    assert await ask(known_prompt) < 32
    long_body = {
        "prompt": known_prompt,
        "model": "demo",
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=long_body) as running_stream:
        lines = running_stream.aiter_lines()
        await anext(lines)
        await ask(f"{name} begins a session.", **session)
    await asyncio.sleep(0.5)
    num_cached = await ask(known_prompt, **session)
    assert await ask(known_prompt) > 64  # the same prompt without a session
    return num_cached < 32
