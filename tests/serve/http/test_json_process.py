"""Limits on the number of values in a body, and the process that decodes long bodies."""

from __future__ import annotations

import asyncio
import io
import json
import marshal
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.app_client import app_client, make_services

from penstock.errors import UnavailableError
from penstock.serve.http import json_process
from penstock.serve.http.json_decoder import JsonDecoder
from penstock.serve.http.json_process import (
    REPLY_HEADER,
    REQUEST_HEADER,
    InvalidJsonError,
    TooManyValuesError,
    decode,
    reply_to,
    serve,
)

NO_LIMIT = 10**9
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


@pytest.fixture
async def decoder() -> AsyncIterator[JsonDecoder]:
    json_decoder = JsonDecoder()
    yield json_decoder
    await json_decoder.close()


def count_values(value: Any) -> tuple[int, int]:
    """Return the number of objects, arrays and keys, and the number of commas between values."""
    if isinstance(value, dict | list):
        counts = [count_values(element) for element in (value.values() if isinstance(value, dict) else value)]
        num_keys = len(value) if isinstance(value, dict) else 0
        return (
            1 + num_keys + sum(element for element, _ in counts),
            max(0, len(value) - 1) + sum(element for _, element in counts),
        )
    return 0, 0


@given(JSON, st.booleans())
def test_values_are_counted_outside_strings(value: Any, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    num_values, num_items = count_values(value)
    assert decode(body, num_values, num_items) == value
    if num_values:
        with pytest.raises(TooManyValuesError, match=f"has {num_values} objects, arrays and keys"):
            decode(body, num_values - 1, NO_LIMIT)
    if num_items:
        with pytest.raises(TooManyValuesError, match="values; the limit is"):
            decode(body, NO_LIMIT, num_items - 1)


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * 100_000 + b"[]]",
        b"{" + b",".join(b'"%d":1' % number for number in range(100_000)) + b"}",
        b"[" + b'{"a":1},' * 50_000 + b"{}]",
        b"[" * 100_000,
        b'{"a":"' + b'\\"' * 1000 + b'", "b":[' + b"[]," * 100_000,
    ],
)
def test_too_many_values_are_refused_before_decoding(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_process, "json", None)
    with pytest.raises(TooManyValuesError, match="the limit is 50000"):
        decode(body, 50_000, NO_LIMIT)


def test_the_content_of_a_long_string_is_not_counted() -> None:
    text = 'a, [b]: {c} "d" \\' * 50_000
    assert decode(json.dumps({"prompt": text}).encode(), 2, 0) == {"prompt": text}


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, True, None, "x", "é\U0001f600"]},
        [2**200, -(2**63)],
        [],
        "x" * 3_000_000,
        list(range(100_000)),
    ],
)
async def test_the_process_returns_the_value(decoder: JsonDecoder, value: Any) -> None:
    assert await decoder.decode(json.dumps(value).encode(), NO_LIMIT, NO_LIMIT) == value


async def test_the_process_continues_after_a_refusal(decoder: JsonDecoder) -> None:
    with pytest.raises(InvalidJsonError, match="the key 'a' occurs twice"):
        await decoder.decode(b'{"a": 1, "a": 2}', NO_LIMIT, NO_LIMIT)
    with pytest.raises(TooManyValuesError, match="has 3 objects"):
        await decoder.decode(b"[[], []]", 2, NO_LIMIT)
    process = decoder._process
    assert await decoder.decode(b"[1]", NO_LIMIT, NO_LIMIT) == [1]
    assert decoder._process is process


async def test_concurrent_bodies_get_their_own_values(decoder: JsonDecoder) -> None:
    bodies = [json.dumps([number] * 50_000).encode() for number in range(5)]
    results = await asyncio.gather(*(decoder.decode(body, NO_LIMIT, NO_LIMIT) for body in bodies))
    assert [result[0] for result in results] == [0, 1, 2, 3, 4]


async def test_a_process_that_has_ended_is_restarted(decoder: JsonDecoder) -> None:
    await decoder.decode(b"[]", NO_LIMIT, NO_LIMIT)
    assert decoder._process is not None
    decoder._process.send_signal(signal.SIGSTOP)
    decode_task = asyncio.ensure_future(decoder.decode(b"[1]", NO_LIMIT, NO_LIMIT))
    await asyncio.sleep(0.05)
    decoder._process.kill()
    with pytest.raises(UnavailableError, match="has ended"):
        await decode_task
    assert await decoder.decode(b"[1]", NO_LIMIT, NO_LIMIT) == [1]


async def test_the_reply_to_a_cancelled_request_is_discarded(decoder: JsonDecoder) -> None:
    long_task = asyncio.ensure_future(
        decoder.decode(json.dumps(["x"] * 500_000).encode(), NO_LIMIT, NO_LIMIT)
    )
    await asyncio.sleep(0.05)
    long_task.cancel()
    assert await decoder.decode(b"[1]", NO_LIMIT, NO_LIMIT) == [1]


async def test_the_pipes_of_a_cancelled_request_are_closed() -> None:
    decoder = JsonDecoder()
    await decoder.decode(b"[]", NO_LIMIT, NO_LIMIT)
    assert decoder._process is not None
    assert decoder._process.stdout is not None
    decoder._process.send_signal(signal.SIGSTOP)
    task = asyncio.ensure_future(decoder.decode(b"[1]", NO_LIMIT, NO_LIMIT))
    await asyncio.sleep(0)
    # A long reply arrives, and the request is cancelled before it reads the reply. asyncio stops watching
    # the pipe.
    decoder._process.stdout.feed_data(REPLY_HEADER.pack(json_process.DECODED, 2**30) + bytes(2**23))
    transport = decoder._process._transport
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await decoder.decode(b"[1]", NO_LIMIT, NO_LIMIT) == [1]
    await decoder.close()
    assert transport.is_closing()
    assert transport.get_pipe_transport(1).is_closing()


def test_the_process_serves_until_its_input_ends() -> None:
    requests = b"".join(
        REQUEST_HEADER.pack(len(body), 5, 5) + body for body in (b"[1]", b"{", b"[[],[],[],[],[],[]]")
    )
    replies = io.BytesIO()
    serve(io.BytesIO(requests + REQUEST_HEADER.pack(10, 5, 5) + b"half"), replies)
    replies.seek(0)
    kinds_and_replies = []
    while head := replies.read(REPLY_HEADER.size):
        kind, size = REPLY_HEADER.unpack(head)
        kinds_and_replies.append((kind, replies.read(size)))
    assert [kind for kind, _ in kinds_and_replies] == [
        json_process.DECODED,
        json_process.INVALID_JSON,
        json_process.TOO_MANY_VALUES,
    ]
    assert marshal.loads(kinds_and_replies[0][1]) == [1]
    assert kinds_and_replies[1] == reply_to(b"{", 5, 5)


@pytest.mark.parametrize("length", [0, 100_000, 600_000])
async def test_the_error_message_contains_the_limit(length: int) -> None:
    """The message is the same whether the server or the process decodes the body."""
    async with app_client(make_services(max_json_values=100)) as client:
        body = {"model": "demo", "prompt": "a" * length, "stop": [{}] * 200}
        response = await client.post("/v1/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "too_many_values")
        assert "has 205 objects, arrays and keys; the limit is 100" in error["message"]
        assert "--max-json-values" in error["message"]


async def test_token_ids_are_limited_to_4_times_the_maximum_length() -> None:
    services = make_services(max_json_values=100)
    assert services.json_limits == (100, 4 * 2048)
    async with app_client(services) as client:
        assert (await client.post("/detokenize", json={"tokens": [65] * 8000})).json() == {
            "prompt": "A" * 8000
        }
        refused_response = await client.post("/detokenize", json={"tokens": [65] * 10_000})
    assert refused_response.json()["error"]["code"] == "too_many_values"
