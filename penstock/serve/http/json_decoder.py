"""The decoding of long bodies in a process of its own, as the event loop sees it."""

from __future__ import annotations

import asyncio
import gc
import marshal
import sys
from contextlib import suppress
from typing import Any

from penstock.errors import UnavailableError
from penstock.serve.http import json_process
from penstock.serve.http.json_process import (
    INVALID,
    REPLY,
    REQUEST,
    VALUE,
    InvalidJsonError,
    TooManyValuesError,
)

_READ_LIMIT = 2**20
_FEW_BYTES = 256 * 1024
"""Of a reply that is unpacked on the event loop."""


class JsonDecoder:
    """Decodes one body at a time, in a process that starts with the first of them.

    A process that ends, as by the kernel's lack of memory, is started again for the next body.

    Args:
        niceness: of the process, beside the server's own.
    """

    def __init__(self, niceness: int = 0) -> None:
        self._niceness = niceness
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def decode(self, body: bytes, max_values: int, max_items: int) -> Any:
        """The value of a body, under the rules of `penstock.serve.http.json_process.decode`.

        Raises:
            InvalidJsonError: it is no JSON.
            TooManyValuesError: it has more values than the limits.
            UnavailableError: the process ended.
        """
        async with self._turn:
            try:
                kind, data = await self._exchange(REQUEST.pack(len(body), max_values, max_items), body)
            except (OSError, asyncio.IncompleteReadError) as error:
                self._drop()
                raise UnavailableError(f"the process that decodes long bodies has ended: {error}") from error
            except BaseException:
                self._drop()  # the reply to a request that was given up must not answer the next
                raise
        if kind == VALUE:
            if len(data) <= _FEW_BYTES:
                return marshal.loads(data)
            return await asyncio.to_thread(_unpacked, data)
        message = data.decode(errors="replace")
        raise InvalidJsonError(message) if kind == INVALID else TooManyValuesError(message)

    async def close(self) -> None:
        """Ends the process, if there is one."""
        process = self._drop()
        if process is not None:
            await process.wait()

    def _drop(self) -> asyncio.subprocess.Process | None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
        return process

    async def _exchange(self, head: bytes, body: bytes) -> tuple[int, bytes]:
        if self._process is None or self._process.returncode is not None:
            self._process = await _start(self._niceness)
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        requests.write(head)
        requests.write(body)
        await requests.drain()
        kind, size = REPLY.unpack(await replies.readexactly(REPLY.size))
        return kind, await replies.readexactly(size)


async def _start(niceness: int) -> asyncio.subprocess.Process:
    # Not -m: the script needs nothing but the standard library, and starts in some 20 ms.
    command = [sys.executable, "-I", "-S", json_process.__file__, str(niceness)]
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the server, which closes the pipe
        limit=_READ_LIMIT,
    )


def _unpacked(data: bytes) -> Any:
    was_enabled = gc.isenabled()
    gc.disable()  # else it looks at all of the value several times, in which no other thread runs
    try:
        return marshal.loads(data)
    finally:
        if was_enabled:
            gc.enable()
