"""Runs the batches of a server one after another, and continues them after a restart of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from starlette.types import ASGIApp

from penstock.errors import InputError
from penstock.serve.batches.batch_dispatch import BatchDispatcher, StoppedError
from penstock.serve.batches.batch_lines import (
    BatchRequest,
    InvalidLine,
    count_unique_lines,
    finished_ids,
    read_lines,
    remaining_lines,
)
from penstock.serve.batches.batch_store import BatchObject, FileObject, ObjectStore, file_object
from penstock.serve.services import Services

ACTIVE_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
"""The statuses of a batch that has not ended."""
_SAVE_INTERVAL = 1.0
"""Minimum seconds between two writes of the request counts to disk while a batch runs."""


class BatchManager:
    """Stores the files and batches of a server, and runs the batches one after another.

    Args:
        services: the objects that routes use.
        app: the application that runs the requests of batches.
        state_dir: the folder for files and batches.
    """

    def __init__(self, services: Services, app: ASGIApp, state_dir: str) -> None:
        folder = Path(state_dir).expanduser()
        self.files = ObjectStore[FileObject](folder / "files", "file-")
        self.batches = ObjectStore[BatchObject](folder / "batches", "batch_")
        self._services = services
        self._app = app
        self._loop_task: asyncio.Task[None] | None = None  # runs `_run_batches`
        self._wake_event = asyncio.Event()  # set when a batch was created or cancelled
        self._current_batch: BatchObject | None = None
        self._batch_task: asyncio.Task[None] | None = None  # runs `_run_batch` for the current batch

    def start(self) -> None:
        """Start or wake the task that runs batches. The task runs the oldest unfinished batch first."""
        self._wake_event.set()
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.ensure_future(self._run_batches())

    def close(self) -> None:
        """Cancel the task that runs batches. The batches continue when the server starts again."""
        if self._loop_task is not None and not self._loop_task.get_loop().is_closed():
            self._loop_task.get_loop().call_soon_threadsafe(self._loop_task.cancel)

    def current_state(self, batch: BatchObject) -> BatchObject:
        """Return a batch in its current state, which may be newer than the state on disk."""
        running_batch = self._current_batch
        return running_batch if running_batch is not None and running_batch["id"] == batch["id"] else batch

    async def cancel(self, batch: BatchObject) -> BatchObject:
        """Start to cancel a batch, unless it has ended. Keep its existing results. Return its state."""
        batch = self.current_state(batch)
        if batch["status"] not in ACTIVE_STATUSES:
            return batch
        batch |= {"status": "cancelling", "cancelling_at": int(time.time())}
        await asyncio.to_thread(self.batches.put, batch)
        if self._batch_task is not None and self._current_batch is batch:
            self._batch_task.cancel()
        self.start()
        return batch

    async def _run_batches(self) -> None:
        """Run batches until the server stops."""
        while not self._services.gate.refusal_reason:
            self._wake_event.clear()
            active_batches = [
                candidate
                for candidate in await asyncio.to_thread(self.batches.all)
                if candidate["status"] in ACTIVE_STATUSES
            ]
            if not active_batches:
                await self._wake_event.wait()
                continue
            batch = self._current_batch = active_batches[-1]
            self._batch_task = asyncio.ensure_future(self._run_batch(batch))
            try:
                await asyncio.wait((self._batch_task,))
                if self._batch_task.cancelled() or self._batch_task.exception() is None:
                    if batch["status"] in ACTIVE_STATUSES:
                        await asyncio.to_thread(self._finish, batch, "cancelled")
                elif isinstance(self._batch_task.exception(), StoppedError):
                    await asyncio.to_thread(self.batches.put, batch)
                    return
                else:
                    error = self._batch_task.exception()
                    self._services.log.error("the batch %s failed", batch["id"], exc_info=error)
                    await asyncio.to_thread(self._fail, batch, "internal_error", "see the server's log")
            finally:
                self._batch_task.cancel()
                self._current_batch = self._batch_task = None

    async def _run_batch(self, batch: BatchObject) -> None:
        if batch["status"] == "cancelling":
            return
        services, counts = self._services, batch["request_counts"]
        result_path = self.files.content_path(batch["results"])
        failure_path = self.files.content_path(batch["failures"])
        try:
            completed_ids = await asyncio.to_thread(finished_ids, result_path)
            failed_ids = await asyncio.to_thread(finished_ids, failure_path)
            counts["total"] = await asyncio.to_thread(lambda: count_unique_lines(self._lines(batch)))
        except InputError as error:
            await asyncio.to_thread(self._fail, batch, "invalid_input_file", str(error))
            return
        counts["completed"], counts["failed"] = len(completed_ids), len(failed_ids)
        batch |= {"status": "in_progress", "in_progress_at": batch["in_progress_at"] or int(time.time())}
        await asyncio.to_thread(self.batches.put, batch)
        saved_at = time.monotonic()
        with result_path.open("ab") as result_file, failure_path.open("ab") as failure_file:

            def write_result(line: bytes, is_success: bool, num_tokens: int) -> None:
                nonlocal saved_at
                file = result_file if is_success else failure_file
                file.write(line + b"\n")
                file.flush()
                counts["completed" if is_success else "failed"] += 1
                if time.monotonic() - saved_at > _SAVE_INTERVAL:
                    saved_at = time.monotonic()
                    self.batches.put(batch)

            dispatcher = BatchDispatcher(
                self._app,
                services.worker.info.max_batch_size,
                is_stopping=lambda: bool(services.gate.refusal_reason),
                on_result=write_result,
            )
            await dispatcher.run(remaining_lines(self._lines(batch), completed_ids | failed_ids))
        await asyncio.to_thread(self._finish, batch, "completed")

    def _lines(self, batch: BatchObject) -> Iterator[BatchRequest | InvalidLine]:
        """Yield the lines of a batch.

        A line whose ``url`` is not the batch's endpoint is an `InvalidLine`.
        """
        path = self.files.content_path(batch["input_file_id"])
        for line in read_lines(path, *self._services.json_limits):
            if isinstance(line, BatchRequest) and line.url != batch["endpoint"]:
                message = f"url is {line.url!r}, but the endpoint of the batch is {batch['endpoint']!r}"
                yield InvalidLine(line.custom_id, "mismatched_url", message)
            else:
                yield line

    def _finish(self, batch: BatchObject, status: Literal["completed", "cancelled"]) -> None:
        """Register the result files of a batch and set its final status."""
        batch["output_file_id"] = self._register_result_file(batch, batch["results"], "output")
        batch["error_file_id"] = self._register_result_file(batch, batch["failures"], "error")
        batch["status"] = status
        batch["completed_at" if status == "completed" else "cancelled_at"] = int(time.time())
        self.batches.put(batch)

    def _register_result_file(self, batch: BatchObject, file_id: str, title: str) -> str | None:
        """Store the file object of a result file and return its id. Delete an empty file and return None.

        Args:
            batch: the batch.
            file_id: the id of the file.
            title: ``output`` or ``error``, for the file name that clients get.
        """
        path = self.files.content_path(file_id)
        size = path.stat().st_size if path.exists() else 0
        if not size:
            path.unlink(missing_ok=True)
            return None
        file_name = f"{batch['id']}_{title}.jsonl"
        self.files.put(file_object(file_id, batch["owner"], file_name, "batch_output", size))
        return file_id

    def _fail(self, batch: BatchObject, code: str, message: str) -> None:
        data = [{"code": code, "message": message, "param": None, "line": None}]
        batch |= {"status": "failed", "failed_at": int(time.time())}
        batch["errors"] = {"object": "list", "data": data}
        self.batches.put(batch)
