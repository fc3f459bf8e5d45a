"""``/v1/files`` and ``/v1/batches`` with OpenAI's official client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.in_process_server import InProcessServer, run_in_process

from penstock.pipelines.core import TextContext
from penstock.serve.batches.batch_manager import BatchManager
from penstock.testing import FakePipeline


def make_request_lines(count: int, **fields: Any) -> bytes:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return b"".join(
        json.dumps(
            {"custom_id": f"n{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        ).encode()
        + b"\n"
        for i in range(count)
    )


async def start_batch(server: InProcessServer, data: bytes, endpoint: Any = "/v1/chat/completions") -> Any:
    file = await server.openai.files.create(file=("in.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(data), "in.jsonl", "batch")
    return await server.openai.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


async def wait_until_ended(server: InProcessServer, batch_id: str) -> Any:
    async with asyncio.timeout(30):
        while (batch := await server.openai.batches.retrieve(batch_id)).status in (
            "validating",
            "in_progress",
            "cancelling",
        ):
            await asyncio.sleep(0.02)
    return batch


async def read_results(server: InProcessServer, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    content = await server.openai.files.content(file_id)
    return {result["custom_id"]: result for result in map(json.loads, content.text.splitlines())}


async def test_a_batch_writes_results_and_errors(tmp_path: Path) -> None:
    async with run_in_process(state_dir=str(tmp_path)) as server:
        client = server.openai
        data = make_request_lines(3) + make_request_lines(1, colour=1).replace(b'"n0"', b'"bad"') + b"{}\n"
        new_batch = await start_batch(server, data)
        assert (new_batch.status, new_batch.metadata) == ("validating", {"a": "b"})
        batch = await wait_until_ended(server, new_batch.id)
        assert (batch.status, batch.request_counts.to_dict()) == (
            "completed",
            {"total": 5, "completed": 3, "failed": 2},
        )
        successes, failures = (
            await read_results(server, batch.output_file_id),
            await read_results(server, batch.error_file_id),
        )
        assert sorted(successes) == ["n0", "n1", "n2"]
        assert successes["n1"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello!"
        assert failures["bad"]["response"]["body"]["error"]["param"] == "colour"
        assert failures["line-5"]["error"]["code"] == "invalid_request"
        assert [item.id async for item in client.batches.list()] == [batch.id]
        files = [file async for file in client.files.list()]
        assert {file.id for file in files} == {
            batch.input_file_id,
            batch.output_file_id,
            batch.error_file_id,
        }
        assert [file.id async for file in client.files.list(purpose="batch")] == [batch.input_file_id]
        assert (await client.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status == "completed"


async def test_a_batch_continues_after_a_restart(tmp_path: Path) -> None:
    long_pipeline = FakePipeline.answering(lambda prompt: "x" * 2000)
    async with run_in_process(long_pipeline, max_batch_size=2, state_dir=str(tmp_path)) as server:
        new_batch = await start_batch(server, make_request_lines(9, max_tokens=60))
        async with asyncio.timeout(30):
            while (
                server.services.states.of(BatchManager)
                .current_state({"id": new_batch.id})
                .get("request_counts", {})
                .get("completed", 0)
                < 3
            ):
                await asyncio.sleep(0.005)
        server.services.gate.close()
        await asyncio.sleep(0.1)
    result_files = list((tmp_path / "files").glob("*.jsonl"))
    num_results_before = sum(path.read_text().count('"batch_req_') for path in result_files)
    assert 3 <= num_results_before < 9
    async with run_in_process(state_dir=str(tmp_path)) as server:
        server.services.states.of(BatchManager).start()  # continues the batches, as at the start of a server
        batch = await wait_until_ended(server, new_batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 9)
        results = await read_results(server, batch.output_file_id)
        texts = [value["response"]["body"]["choices"][0]["message"]["content"] for value in results.values()]
        assert (texts.count("x" * 60), texts.count("Hello!")) == (num_results_before, 9 - num_results_before)


async def test_a_batch_can_be_cancelled(tmp_path: Path) -> None:
    def choose(context: TextContext) -> int:
        time.sleep(0.005)  # 2,048 tokens take 10 s, so that requests run until they are cancelled
        return ord("x")

    async with run_in_process(FakePipeline(choose), state_dir=str(tmp_path)) as server:
        first_batch, second_batch = (
            await start_batch(server, make_request_lines(2)),
            await start_batch(server, make_request_lines(1)),
        )
        for new_batch in (second_batch, first_batch):
            cancelled_batch = await server.openai.batches.cancel(new_batch.id)
            assert cancelled_batch.status == "cancelling"
        for new_batch in (first_batch, second_batch):
            batch = await wait_until_ended(server, new_batch.id)
            assert (batch.status, batch.output_file_id) == ("cancelled", None)
        assert server.services.worker.num_outstanding == 0


async def test_files_are_listed_in_the_order_of_their_creation(tmp_path: Path) -> None:
    async with run_in_process(state_dir=str(tmp_path)) as server:
        client = server.openai
        files = [await client.files.create(file=make_request_lines(1), purpose="batch") for _ in range(12)]
        newest_ids = [file.id for file in files[::-1]]
        assert [file.id async for file in client.files.list()] == newest_ids
        assert [file.id async for file in client.files.list(order="desc")] == newest_ids
        assert [file.id async for file in client.files.list(order="asc", limit=5)] == newest_ids[::-1]
        refused_response = await server.http.get("/v1/files", params={"order": "size"})
        assert refused_response.json()["error"]["param"] == "order"


async def test_invalid_files_and_batches_are_refused(tmp_path: Path) -> None:
    async with run_in_process(state_dir=str(tmp_path), max_file_size=3000, api_key=("one", "two")) as server:
        client = server.openai.with_options(api_key="one")
        with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
            await client.files.create(file=b"x", purpose="vision")
        with pytest.raises(openai.APIStatusError) as size_error:
            await client.files.create(file=b"x" * 4000, purpose="batch")
        assert size_error.value.status_code == 413
        headers = {"authorization": "Bearer one"}
        for data, media_type, status in (
            (b"", "multipart/form-data; boundary=x", 400),
            (b"--x\r\n", "multipart/form-data; boundary=x", 400),
            (
                b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--',
                "multipart/form-data; boundary=x",
                400,
            ),
            (b"{}", "application/json", 415),
        ):
            refused_response = await server.http.post(
                "/v1/files", content=data, headers={**headers, "content-type": media_type}
            )
            assert refused_response.status_code == status, data
        file = await client.files.create(file=make_request_lines(1) + make_request_lines(1), purpose="batch")
        fields: Any = {"completion_window": "24h"}
        with pytest.raises(openai.BadRequestError, match="there is no file"):
            await client.batches.create(input_file_id="file-../x", endpoint="/v1/responses", **fields)
        with pytest.raises(openai.BadRequestError, match="endpoint must be one of"):
            await client.batches.create(input_file_id=file.id, endpoint="/v1/x", **fields)  # type: ignore[arg-type]
        other_client = server.openai.with_options(api_key="two")
        with pytest.raises(openai.NotFoundError):
            await other_client.files.retrieve(file.id)
        new_batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", **fields
        )
        async with asyncio.timeout(30):
            while (batch := await client.batches.retrieve(new_batch.id)).status != "failed":
                await asyncio.sleep(0.02)
        assert batch.errors is not None
        assert "two lines have the custom_id 'n0'" in str(batch.errors.data)
        assert {path.suffix for path in tmp_path.rglob("*.*")} >= {".json", ".jsonl"}
    async with run_in_process() as server:
        with pytest.raises(openai.BadRequestError, match="--state-dir"):
            await server.openai.files.list()


def make_form_part(name: str, content: bytes, **parameters: str) -> bytes:
    """Return a part of a multipart form whose boundary is ``x``."""
    parameter_text = "".join(f'; {key}="{value}"' for key, value in parameters.items())
    return (
        f'--x\r\nContent-Disposition: form-data; name="{name}"{parameter_text}\r\n\r\n'.encode()
        + content
        + b"\r\n"
    )


PURPOSE = make_form_part("purpose", b"batch")
FILE = make_form_part("file", b"\r\n--y", filename="a/b.jsonl")
MALFORMED_FORMS = {
    "its last part is incomplete": PURPOSE + FILE,
    "two files": PURPOSE + FILE + FILE + b"--x--",
    "file is required": PURPOSE + b"--x--",
    "longer than 4096 bytes": make_form_part("purpose", b"b" * 4097) + FILE + b"--x--",
    "more than 16 fields": b"".join(make_form_part(f"f{number}", b"") for number in range(17))
    + FILE
    + b"--x--",
    "unknown field 'other'": PURPOSE + make_form_part("other", b"1") + FILE + b"--x--",
    "malformed": b"purpose=batch",
}


@pytest.mark.parametrize("message", MALFORMED_FORMS)
async def test_malformed_forms_are_refused(tmp_path: Path, message: str) -> None:
    async with run_in_process(state_dir=str(tmp_path)) as server:
        response = await server.http.post(
            "/v1/files",
            content=MALFORMED_FORMS[message],
            headers={"content-type": "multipart/form-data; boundary=x"},
        )
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
        assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
async def test_a_form_in_chunks_is_parsed(tmp_path: Path, chunk_size: int) -> None:
    form_data = FILE + PURPOSE + b"--x--\r\n"

    async def send_chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(form_data), chunk_size):
            yield form_data[start : start + chunk_size]

    async with run_in_process(state_dir=str(tmp_path)) as server:
        response = await server.http.post(
            "/v1/files", content=send_chunks(), headers={"content-type": 'multipart/form-data; boundary="x"'}
        )
        file = response.json()
        assert (file["filename"], file["bytes"]) == ("b.jsonl", 5)
        content = await server.http.get(f"/v1/files/{file['id']}/content")
        assert content.content == b"\r\n--y"


async def test_a_line_whose_url_is_not_the_endpoint_of_its_batch_fails(tmp_path: Path) -> None:
    async with run_in_process(state_dir=str(tmp_path)) as server:
        new_batch = await start_batch(server, make_request_lines(1), "/v1/responses")
        batch = await wait_until_ended(server, new_batch.id)
        assert batch.request_counts.failed == 1
        assert (await read_results(server, batch.error_file_id))["n0"]["error"]["code"] == "mismatched_url"
