"""`BatchDispatcher`, which sends the lines of a batch to the server's routes, and the files of a batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.in_process_server import InProcessServer, run_in_process

from penstock.errors import InputError
from penstock.serve.batches.batch_dispatch import BatchDispatcher, StoppedError, post
from penstock.serve.batches.batch_lines import (
    PRIORITY_OFFSET,
    BatchRequest,
    InvalidLine,
    count_unique_lines,
    finished_ids,
    parse_line,
    read_lines,
    remaining_lines,
)
from penstock.testing import FakePipeline

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


def make_request_line(name: str, url: str = "/v1/chat/completions", **body: Any) -> bytes:
    body = {key: value for key, value in {**CHAT, **body}.items() if value is not None}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}).encode()


def parse_requests(*lines: bytes) -> Iterator[BatchRequest | InvalidLine]:
    return (parse_line(text, number, 1000, 1000) for number, text in enumerate(lines, 1))


async def dispatch(
    server: InProcessServer, lines: Iterable[BatchRequest | InvalidLine], concurrency: int = 4
) -> tuple[dict[str, Any], list[tuple[bool, int]]]:
    """Run lines of a batch. Return custom_id -> result, and (success, number of tokens) of each result."""
    results, successes_and_tokens = {}, []

    def store_result(result: bytes, has_succeeded: bool, num_tokens: int) -> None:
        decoded_result = json.loads(result)
        results[decoded_result["custom_id"]] = decoded_result
        successes_and_tokens.append((has_succeeded, num_tokens))

    app = server.app
    dispatcher = BatchDispatcher(app, concurrency, is_stopping=lambda: False, on_result=store_result)
    await dispatcher.run(iter(lines))
    return results, successes_and_tokens


async def test_a_result_is_one_line_for_readers_that_split_at_unicode_line_ends() -> None:
    rows: list[bytes] = []
    async with run_in_process(FakePipeline.saying("a\u2028b\x85")) as server:
        app = server.app
        dispatcher = BatchDispatcher(
            app, 1, is_stopping=lambda: False, on_result=lambda result, *_: rows.append(result)
        )
        await dispatcher.run(
            parse_requests(make_request_line("good\u2029"), make_request_line("bad\u2029", url="/x"))
        )
    success, failure = (json.loads(row) for row in b"\n".join(rows).decode().splitlines())
    assert success["response"]["body"]["choices"][0]["message"]["content"] == "a\u2028b\x85"
    assert (success["custom_id"], failure["custom_id"]) == ("good\u2029", "bad\u2029")


async def test_valid_and_invalid_lines_have_results() -> None:
    async with run_in_process() as server:
        results, successes_and_tokens = await dispatch(
            server,
            parse_requests(
                make_request_line("chat"),
                make_request_line("text", "/v1/completions", messages=None, prompt="Hi", max_tokens=3),
                make_request_line("response", "/v1/responses", messages=None, input="Hi"),
                make_request_line("bad", colour=1),
                make_request_line("model", model="other"),
                make_request_line("stream", stream=True),
                make_request_line("url", "/v1/files"),
                b"{",
                b"[]",
                make_request_line("task", "/v1/embeddings", messages=None, input="Hi"),
            ),
        )
    bodies = {name: result["response"] and result["response"]["body"] for name, result in results.items()}
    assert bodies["chat"]["choices"][0]["message"]["content"] == "Hello!"
    assert bodies["text"]["choices"][0]["text"] == "Hel"
    assert bodies["response"]["output"][0]["content"][0]["text"] == "Hello!"
    assert results["chat"]["response"]["status_code"] == 200
    assert results["chat"]["response"]["request_id"]
    assert (results["bad"]["response"]["status_code"], bodies["bad"]["error"]["param"]) == (400, "colour")
    assert (results["model"]["response"]["status_code"], bodies["task"]["error"]["code"]) == (
        404,
        "unsupported_task",
    )
    errors = {name: result["error"]["message"] for name, result in results.items() if result["error"]}
    assert "stream and background are not available" in errors["stream"]
    assert "url is '/v1/files'" in errors["url"]
    assert errors["line-9"] == "line 9 is not a JSON object"
    assert errors["line-8"].startswith("line 8: ")
    assert (
        sum(has_succeeded for has_succeeded, _ in successes_and_tokens),
        sum(num_tokens for _, num_tokens in successes_and_tokens),
    ) == (3, 7 + 3 + 7)


async def test_batches_need_no_key_and_have_a_lower_priority() -> None:
    (request,) = parse_requests(make_request_line("a", priority=5))
    assert isinstance(request, BatchRequest)
    assert request.body["priority"] == PRIORITY_OFFSET + 5
    for priority in (True, 1.5, "1", {}):
        invalid_line = parse_line(make_request_line("a", priority=priority), 1, 1000, 1000)
        assert isinstance(invalid_line, InvalidLine)
        assert "body.priority must be a whole number" in invalid_line.message
    async with run_in_process(api_key=("one", "two")) as server:
        app = server.app
        assert (await post(app, "/v1/chat/completions", request.body)).status == 200
        other_response = await server.http.post("/v1/chat/completions", json=CHAT)
        assert other_response.status_code == 401


async def test_the_dispatcher_waits_while_the_queue_is_full() -> None:
    async with run_in_process(max_queue_size=1, max_batch_size=1) as server:
        results, _ = await dispatch(
            server, parse_requests(*[make_request_line(f"n{index}") for index in range(12)]), concurrency=12
        )
        assert {value["response"]["status_code"] for value in results.values()} == {200}
        assert len(results) == 12


async def test_lines_after_a_stop_have_no_result() -> None:
    async with run_in_process(FakePipeline.saying("x" * 200)) as server:
        app = server.app
        results: list[bytes] = []
        dispatcher = BatchDispatcher(
            app, 2, is_stopping=lambda: len(results) >= 3, on_result=lambda result, *_: results.append(result)
        )
        with pytest.raises(StoppedError):
            await dispatcher.run(parse_requests(*[make_request_line(f"n{index}") for index in range(9)]))
        assert 3 <= len(results) <= 4


async def test_cancelling_a_batch_cancels_its_requests() -> None:
    async with run_in_process(FakePipeline.saying("x" * 100_000)) as server:
        task = asyncio.create_task(
            dispatch(server, parse_requests(make_request_line("a"), make_request_line("b")))
        )
        async with asyncio.timeout(30):
            while server.services.worker.num_outstanding < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait((task,))
            while server.services.worker.num_outstanding:
                await asyncio.sleep(0.01)


def test_lines_with_a_result_are_skipped_and_invalid_files_are_refused(tmp_path: Path) -> None:
    input_path, results_path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    input_path.write_bytes(b"\n".join([make_request_line("a"), b"", make_request_line("b"), b"{}"]) + b"\n")
    assert finished_ids(results_path) == set()
    results_path.write_text('{"custom_id": "a", "response": null}\n{"custom_id": "b", "resp')
    assert finished_ids(results_path) == {"a"}
    assert results_path.read_text() == '{"custom_id": "a", "response": null}\n'
    remaining_ids = [
        request.custom_id for request in remaining_lines(read_lines(input_path, 100, 100), {"a"})
    ]
    assert remaining_ids == ["b", "line-4"]
    assert count_unique_lines(read_lines(input_path, 100, 100)) == 3
    input_path.write_bytes(make_request_line("a") + b"\n" + make_request_line("a"))
    with pytest.raises(InputError, match="two lines have the custom_id 'a'"):
        count_unique_lines(read_lines(input_path, 100, 100))
    results_path.write_text("text\n")
    with pytest.raises(InputError, match="is not the result of a batch"):
        finished_ids(results_path)
