"""The session of a request is the value of a header, or else of ``user`` or ``metadata.user_id``."""

from __future__ import annotations

from typing import Any

import pytest
from support.app_client import app_client, make_services
from support.engines import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {**CHAT, "max_tokens": 9}),
    ],
)
async def test_the_session_is_the_header_or_else_the_user(path: str, body: dict[str, Any]) -> None:
    worker = FakeEngine()
    user = {"metadata": {"user_id": "me"}} if path == "/v1/messages" else {"user": "me"}
    async with app_client(make_services(worker)) as client:
        for fields in ({}, user):
            for headers in ({}, {"x-session-id": "talk"}):
                answer = await client.post(path, json={"model": "demo", **body, **fields}, headers=headers)
                assert answer.status_code == 200, answer.text
    assert [context.session_id for context in worker.contexts] == ["", "talk", "me", "talk"]


async def test_the_name_of_the_header_is_a_setting() -> None:
    worker = FakeEngine()
    async with app_client(make_services(worker, session_header="X-Conversation")) as client:
        for name in ("x-session-id", "x-conversation"):
            body = {"model": "demo", "prompt": "Hi"}
            answer = await client.post("/v1/completions", json=body, headers={name: "talk"})
            assert answer.status_code == 200, answer.text
    assert [context.session_id for context in worker.contexts] == ["", "talk"]
