"""The limits on a body's values, and the process that decodes long bodies."""

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
from support.serving import client_of, make_services

from penstock.errors import UnavailableError
from penstock.serve.http import json_process
from penstock.serve.http.json_decoder import JsonDecoder
from penstock.serve.http.json_process import (
    REPLY,
    REQUEST,
    InvalidJsonError,
    TooManyValuesError,
    decode,
    reply_to,
    serve,
)

MANY = 10**9
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.fixture
async def decoder() -> AsyncIterator[JsonDecoder]:
    one = JsonDecoder()
    yield one
    await one.close()


def counts(value: Any) -> tuple[int, int]:
    """Return the number of objects, arrays and keys, and the number of commas."""
    if isinstance(value, dict | list):
        inside = [counts(one) for one in (value.values() if isinstance(value, dict) else value)]
        keys = len(value) if isinstance(value, dict) else 0
        return (
            1 + keys + sum(one for one, _ in inside),
            max(0, len(value) - 1) + sum(one for _, one in inside),
        )
    return 0, 0


@given(JSON, st.booleans())
def test_values_are_counted_outside_of_texts(value: Any, ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii).encode()
    num_values, num_items = counts(value)
    assert decode(body, num_values, num_items) == value
    if num_values:
        with pytest.raises(TooManyValuesError, match=f"has {num_values} objects, arrays and keys"):
            decode(body, num_values - 1, MANY)
    if num_items:
        with pytest.raises(TooManyValuesError, match="values; the limit is"):
            decode(body, MANY, num_items - 1)


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
        decode(body, 50_000, MANY)


def test_a_long_text_has_few_values() -> None:
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
    assert await decoder.decode(json.dumps(value).encode(), MANY, MANY) == value


async def test_the_process_continues_after_a_refusal(decoder: JsonDecoder) -> None:
    with pytest.raises(InvalidJsonError, match="the key 'a' occurs twice"):
        await decoder.decode(b'{"a": 1, "a": 2}', MANY, MANY)
    with pytest.raises(TooManyValuesError, match="has 3 objects"):
        await decoder.decode(b"[[], []]", 2, MANY)
    process = decoder._process
    assert await decoder.decode(b"[1]", MANY, MANY) == [1]
    assert decoder._process is process


async def test_concurrent_bodies_are_decoded_in_sequence(decoder: JsonDecoder) -> None:
    bodies = [json.dumps([number] * 50_000).encode() for number in range(5)]
    found = await asyncio.gather(*(decoder.decode(body, MANY, MANY) for body in bodies))
    assert [one[0] for one in found] == [0, 1, 2, 3, 4]


async def test_a_process_that_ended_is_restarted(decoder: JsonDecoder) -> None:
    await decoder.decode(b"[]", MANY, MANY)
    assert decoder._process is not None
    decoder._process.send_signal(signal.SIGSTOP)
    waiting = asyncio.ensure_future(decoder.decode(b"[1]", MANY, MANY))
    await asyncio.sleep(0.05)
    decoder._process.kill()
    with pytest.raises(UnavailableError, match="has ended"):
        await waiting
    assert await decoder.decode(b"[1]", MANY, MANY) == [1]


async def test_the_reply_to_a_cancelled_request_answers_no_other_request(decoder: JsonDecoder) -> None:
    long = asyncio.ensure_future(decoder.decode(json.dumps(["x"] * 500_000).encode(), MANY, MANY))
    await asyncio.sleep(0.05)
    long.cancel()
    assert await decoder.decode(b"[1]", MANY, MANY) == [1]


def test_the_process_serves_until_its_input_ends() -> None:
    requests = b"".join(
        REQUEST.pack(len(body), 5, 5) + body for body in (b"[1]", b"{", b"[[],[],[],[],[],[]]")
    )
    replies = io.BytesIO()
    serve(io.BytesIO(requests + REQUEST.pack(10, 5, 5) + b"half"), replies)
    replies.seek(0)
    found = []
    while head := replies.read(REPLY.size):
        kind, size = REPLY.unpack(head)
        found.append((kind, replies.read(size)))
    assert [kind for kind, _ in found] == [json_process.VALUE, json_process.INVALID, json_process.TOO_MANY]
    assert marshal.loads(found[0][1]) == [1]
    assert found[1] == reply_to(b"{", 5, 5)


@pytest.mark.parametrize("length", [0, 100_000, 600_000])
async def test_a_server_names_the_limit(length: int) -> None:
    """The same message for short and long bodies."""
    async with client_of(make_services(max_json_values=100)) as client:
        body = {"model": "demo", "prompt": "a" * length, "stop": [{}] * 200}
        response = await client.post("/v1/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "too_many_values")
        assert "has 205 objects, arrays and keys; the limit is 100" in error["message"]
        assert "--max-json-values" in error["message"]


async def test_the_limit_allows_prompts_of_token_ids() -> None:
    services = make_services(max_json_values=100)
    assert services.json_limits == (100, 4 * 2048)
    async with client_of(services) as client:
        assert (await client.post("/detokenize", json={"tokens": [65] * 8000})).json() == {
            "prompt": "A" * 8000
        }
        refused = await client.post("/detokenize", json={"tokens": [65] * 10_000})
    assert refused.json()["error"]["code"] == "too_many_values"
