"""`JsonDecoder`: decodes long request bodies in a separate process, which `json_process` implements."""

from __future__ import annotations

import asyncio
import gc
import marshal
import sys
from contextlib import suppress

from penstock.errors import UnavailableError
from penstock.serve.http import json_process
from penstock.serve.http.json_process import (
    DECODED,
    INVALID_JSON,
    REPLY_HEADER,
    REQUEST_HEADER,
    InvalidJsonError,
    TooManyValuesError,
)

_PIPE_BUFFER_BYTES = 2**20
_MAX_INLINE_REPLY_BYTES = 256 * 1024
"""Longer replies are unmarshalled in a thread, so that they do not block the event loop."""


class JsonDecoder:
    """Decodes bodies one after another in a separate process. The first body starts the process.

    If the process ends, for example because the machine is out of memory, the next body starts a new process.

    Args:
        niceness: the difference between the niceness of the process and that of the server.
    """

    def __init__(self, niceness: int = 0) -> None:
        self._niceness = niceness
        self._process: asyncio.subprocess.Process | None = None
        self._exit_tasks: set[asyncio.Task[None]] = set()
        """One task for each killed process that has not ended yet."""
        self._lock = asyncio.Lock()

    async def decode(self, body: bytes, max_values: int, max_items: int) -> object:
        """Return the value of a body, with the rules of `penstock.serve.http.json_process.decode`.

        Raises:
            InvalidJsonError: the body is not strict JSON.
            TooManyValuesError: the body has more values than the limits.
            UnavailableError: the process has ended or cannot be started.
        """
        async with self._lock:
            try:
                header = REQUEST_HEADER.pack(len(body), max_values, max_items)
                reply_kind, data = await self._exchange(header, body)
            except (OSError, asyncio.IncompleteReadError) as error:
                self._kill()
                raise UnavailableError(
                    f"the process that decodes long bodies has ended or cannot be started: {error}"
                ) from error
            except BaseException:
                self._kill()  # otherwise the reply to this body would be read as the reply to the next body
                raise
        if reply_kind == DECODED:
            if len(data) <= _MAX_INLINE_REPLY_BYTES:
                return marshal.loads(data)
            return await asyncio.to_thread(_unmarshal, data)
        message = data.decode(errors="replace")
        raise InvalidJsonError(message) if reply_kind == INVALID_JSON else TooManyValuesError(message)

    async def close(self) -> None:
        """Stop the process if it is running. Return when all killed processes have ended."""
        self._kill()
        await asyncio.gather(*self._exit_tasks)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            task = asyncio.create_task(_discard_output(process))
            self._exit_tasks.add(task)
            task.add_done_callback(self._exit_tasks.discard)

    async def _exchange(self, header: bytes, body: bytes) -> tuple[int, bytes]:
        if self._process is None or self._process.returncode is not None:
            self._process = await _start(self._niceness)
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        requests.write(header)
        requests.write(body)
        await requests.drain()
        reply_kind, num_bytes = REPLY_HEADER.unpack(await replies.readexactly(REPLY_HEADER.size))
        return reply_kind, await replies.readexactly(num_bytes)


async def _start(niceness: int) -> asyncio.subprocess.Process:
    # As a script, the process imports only the standard library and starts in about 20 ms. With -m it would
    # import the package.
    command = [sys.executable, "-I", "-S", json_process.__file__, str(niceness)]
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C must not reach the process, because the server stops it
        limit=_PIPE_BUFFER_BYTES,
    )


async def _discard_output(process: asyncio.subprocess.Process) -> None:
    """Read the rest of the output and wait until the process has ended.

    asyncio stops watching a pipe with too much unread data. It would then not notice that the process has
    closed the pipe, and the pipe would stay open.
    """
    with suppress(OSError):
        await process.communicate()


def _unmarshal(data: bytes) -> object:
    was_enabled = gc.isenabled()
    gc.disable()  # garbage collections would repeatedly traverse the value and block all other threads
    try:
        return marshal.loads(data)
    finally:
        if was_enabled:
            gc.enable()
