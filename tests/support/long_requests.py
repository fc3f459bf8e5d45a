"""Long requests, which still run when a process of the server is killed."""

from __future__ import annotations

import json
from typing import Any

from support.server_process import raw_exchange

PATHS = ("/v1/chat/completions", "/v1/completions")


async def send_request(port: int, index: int, path: str | None = None) -> str:
    """Send a request. Return its outcome: "answered", "503" or "error event".

    ``index`` selects the path, unless ``path`` is given. Two of every three indices select a streamed
    response.
    """
    path, is_stream = path or PATHS[index % 2], index % 3 > 0
    prompt_fields = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    body: dict[str, Any] = {
        "model": "demo",
        "max_tokens": 400,
        "ignore_eos": True,
        **prompt_fields,
        "stream": is_stream,
    }
    async with raw_exchange(port, path, body) as exchange:
        status, headers = await exchange.head()
        data = await exchange.body(headers)
    if status == 503:
        assert int(headers["retry-after"]) >= 1
        check_error(json.loads(data))
        return "503"
    assert status == 200
    if not is_stream:
        assert json.loads(data)["usage"]["completion_tokens"] == 400
        return "answered"
    *_, last_event = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
    if last_event == b"[DONE]":
        return "answered"
    check_error(json.loads(last_event))
    assert b"[DONE]" not in data
    return "error event"


def check_error(body: dict[str, Any]) -> None:
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == (
        "service_unavailable_error",
        "service_unavailable",
    )
