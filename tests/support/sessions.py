"""Requests to a server with two workers that show whether a session stays with its worker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx

_FILLER = "Once upon a time, far away, there was a small house beside a river. " * 8


async def stays_with_its_worker(
    client: httpx.AsyncClient, name: str, headers: Mapping[str, str] | None = None, **fields: Any
) -> bool:
    """Return whether a session stays with its worker although the other worker has cached its prompt.

    The first worker computes a long prompt. While this worker is busy, the first request of the session goes
    to the second worker. The session then sends the long prompt. If the session stays with the second worker,
    fewer than 32 tokens of the prompt are cached. A request without a session goes to the first worker.

    Args:
        client: the client of an idle server.
        name: a text in the prompts that makes them different in each call.
        headers: the headers of the session.
        fields: the fields of the session's requests.
    """
    known_prompt = f"Story {name} of the old woman. {_FILLER}"

    async def count_cached_tokens(prompt: str, max_tokens: int = 2, **session_fields: Any) -> int:
        """Send a prompt and return how many of its tokens were cached."""
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **session_fields,
        }
        session_headers = headers if session_fields else None
        response = await client.post("/v1/completions", json=body, headers=session_headers)
        response.raise_for_status()
        num_cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return num_cached

    session_body = {"temperature": 0.0, **fields}
    assert await count_cached_tokens(known_prompt) < 32
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
        await count_cached_tokens(f"{name} begins a session.", **session_body)
    await asyncio.sleep(0.5)
    num_cached = await count_cached_tokens(known_prompt, **session_body)
    assert await count_cached_tokens(known_prompt) > 64  # the same prompt without a session
    return num_cached < 32
