"""Stores responses in memory, or in a file in ``--state-dir``."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.errors import ConfigError

T = TypeVar("T")

_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, body BLOB NOT NULL, input BLOB NOT NULL, size INTEGER NOT NULL,
    number INTEGER NOT NULL, is_done INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_number ON responses (number);
CREATE TABLE IF NOT EXISTS items (
    id TEXT PRIMARY KEY, response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS items_by_response ON items (response);
"""
"""The column ``number`` orders the responses by the time at which they were last stored."""
_INTERRUPTED_ERROR = {
    "code": "server_error",
    "message": "the server stopped before the response was complete",
}


@dataclass(frozen=True)
class StoredResponse:
    """A response and its input items in JSON."""

    body: bytes
    input: bytes
    """The list of input items, including the items of previous responses."""

    def history(self) -> list[dict[str, object]]:
        """Return the input items, then the output items of the response."""
        items: list[dict[str, object]] = msgspec.json.decode(self.input)
        return [*items, *msgspec.json.decode(self.body)["output"]]


class ResponseStore:
    """Stores responses in an SQLite database. Deletes the oldest ones if their total size exceeds a maximum.

    The newest response is kept even if it exceeds the maximum alone. The maximum applies to all owners
    together. `get`, `delete` and `item` use only responses of the given owner. All database calls after the
    constructor run in one thread.

    Args:
        path: the file of the database; None keeps the responses in memory.
        max_bytes: maximum total size of the responses and their input items in bytes of JSON.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-responses")
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path or ":memory:", check_same_thread=False)
            self._database.executescript("PRAGMA foreign_keys = ON; PRAGMA journal_mode = WAL;" + _TABLES)
            self._fail_unfinished()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError("state_dir", f"cannot store responses in {path}: {error}") from error

    async def put(
        self, owner: str, response: dict[str, object], items: list[dict[str, object]], *, is_done: bool = True
    ) -> None:
        """Store a response. Replaces a stored response with the same id.

        The next server process sets the status of a response that is not done to ``failed``.
        """
        await self._run(partial(self._put, owner, response, items, is_done))

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response; None if the owner has no response with this id."""
        return await self._run(partial(self._get, owner, response_id))

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response. Return False if the owner has no response with this id."""
        return await self._run(partial(self._delete, owner, response_id))

    async def item(self, owner: str, item_id: str) -> dict[str, object] | None:
        """Return an output item; None if no stored response of the owner has an output item with this id."""
        return await self._run(partial(self._item, owner, item_id))

    def close(self) -> None:
        """Wait for running database calls, then close the database."""
        self._thread.submit(self._database.close)
        self._thread.shutdown()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _put(
        self, owner: str, response: dict[str, object], items: list[dict[str, object]], is_done: bool
    ) -> None:
        encode = msgspec.json.encode
        response_json, input_json = encode(response), encode(items)
        response_id, num_bytes = response["id"], len(response_json) + len(input_json)
        with self._database as database:
            database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            (last_number,) = database.execute("SELECT coalesce(max(number), 0) FROM responses").fetchone()
            row = (response_id, owner, response_json, input_json, num_bytes, last_number + 1, is_done)
            database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            output = response["output"]
            assert isinstance(output, list)
            item_rows = [(item["id"], response_id, encode(item)) for item in output]
            database.executemany("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", item_rows)
            (total_bytes,) = database.execute("SELECT sum(size) FROM responses").fetchone()
            ids_and_bytes = database.execute("SELECT id, size FROM responses ORDER BY number").fetchall()
            while total_bytes > self._max_bytes and len(ids_and_bytes) > 1:
                oldest_id, oldest_bytes = ids_and_bytes.pop(0)
                database.execute("DELETE FROM responses WHERE id = ?", (oldest_id,))
                total_bytes -= oldest_bytes

    def _get(self, owner: str, response_id: str) -> StoredResponse | None:
        query = "SELECT body, input FROM responses WHERE id = ? AND owner = ?"
        row = self._database.execute(query, (response_id, owner)).fetchone()
        return None if row is None else StoredResponse(*row)

    def _delete(self, owner: str, response_id: str) -> bool:
        with self._database as database:
            query = "DELETE FROM responses WHERE id = ? AND owner = ?"
            return database.execute(query, (response_id, owner)).rowcount > 0

    def _item(self, owner: str, item_id: str) -> dict[str, object] | None:
        query = (
            "SELECT data FROM items JOIN responses ON responses.id = items.response "
            "WHERE items.id = ? AND owner = ?"
        )
        row = self._database.execute(query, (item_id, owner)).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    def _fail_unfinished(self) -> None:
        """Set the status ``failed`` for the responses that a previous server process did not finish."""
        query = "SELECT id, body FROM responses WHERE NOT is_done"
        with self._database as database:
            for response_id, body in database.execute(query).fetchall():
                failed_response = {
                    **msgspec.json.decode(body),
                    "status": "failed",
                    "error": _INTERRUPTED_ERROR,
                }
                database.execute(
                    "UPDATE responses SET body = ?, is_done = 1 WHERE id = ?",
                    (msgspec.json.encode(failed_response), response_id),
                )
