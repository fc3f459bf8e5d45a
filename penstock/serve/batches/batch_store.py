"""Stores files and batches on disk. Each object is a JSON file. A file's content is in a second file:

STATE_DIR/files/file-ID.json   STATE_DIR/files/file-ID.jsonl   STATE_DIR/batches/batch_ID.json
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypedDict, TypeVar

import msgspec

from penstock.errors import ConfigError

_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


class StoredObject(TypedDict):
    """The members that files and batches share."""

    id: str
    object: str
    created_at: int
    owner: str


class FileObject(StoredObject):
    """A stored file, with the members of OpenAI's file object."""

    bytes: int
    filename: str
    purpose: str
    status: str


class RequestCounts(TypedDict):
    """The numbers of all requests, of successful requests and of failed requests of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(StoredObject):
    """A batch, with the members of OpenAI's batch object and the ids of its result files."""

    endpoint: str
    errors: Mapping[str, object] | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: Mapping[str, str] | None
    results: str
    """The id of the file with the results of successful requests."""
    failures: str
    """The id of the file with the results of failed requests."""


ObjectT = TypeVar("ObjectT", bound=StoredObject)


class ObjectStore(Generic[ObjectT]):
    """Stores JSON objects by id in one folder.

    `put`, `get`, `delete` and `all` block while they use the disk: call them in a thread.

    Args:
        folder: the folder. It is created if it does not exist.
        id_prefix: the prefix of the ids.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, folder: Path, id_prefix: str) -> None:
        self._folder = folder
        self._id_prefix = id_prefix
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("state_dir", f"{folder} cannot be used: {error.strerror}") from error

    def new_id(self) -> str:
        """Return a new id. Ids sort by creation time, so that `all` can sort objects of the same second."""
        return f"{self._id_prefix}{time.time_ns():016x}{secrets.token_hex(8)}"

    def content_path(self, object_id: str) -> Path:
        """Return the path of a file's content."""
        return self._folder / f"{object_id}.jsonl"

    def put(self, value: ObjectT) -> None:
        """Store an object by its id. Replaces an existing object with the same id atomically."""
        path = self._path(value["id"])
        temporary_path = path.with_suffix(".new")
        temporary_path.write_bytes(msgspec.json.encode(value))
        os.replace(temporary_path, path)

    def get(self, object_id: str, owner: str | None = None) -> ObjectT | None:
        """Return an object; None if it does not exist. With `owner`, also None if it has another owner."""
        if not _ID.fullmatch(object_id) or not object_id.startswith(self._id_prefix):
            return None
        try:
            value: ObjectT = msgspec.json.decode(self._path(object_id).read_bytes())
        except FileNotFoundError:
            return None
        return value if owner is None or value["owner"] == owner else None

    def delete(self, object_id: str) -> None:
        """Delete an object and its content."""
        self._path(object_id).unlink(missing_ok=True)
        self.content_path(object_id).unlink(missing_ok=True)

    def all(self, owner: str | None = None) -> list[ObjectT]:
        """Return all objects of an owner, or of all owners if `owner` is None.

        The newest object comes first.
        """
        object_ids = (path.stem for path in self._folder.glob(f"{self._id_prefix}*.json"))
        objects = [value for object_id in object_ids if (value := self.get(object_id, owner)) is not None]
        return sorted(objects, key=lambda value: (value["created_at"], value["id"]), reverse=True)

    def _path(self, object_id: str) -> Path:
        return self._folder / f"{object_id}.json"


def public_members(value: Mapping[str, object]) -> dict[str, object]:
    """Return an object without the members that are not sent to clients."""
    return {name: member for name, member in value.items() if name not in ("owner", "results", "failures")}


def file_object(file_id: str, owner: str, file_name: str, purpose: str, num_bytes: int) -> FileObject:
    """Return the object that describes a new file with `num_bytes` bytes."""
    return {
        "id": file_id,
        "object": "file",
        "bytes": num_bytes,
        "created_at": time.time_ns() // 10**9,
        "filename": file_name,
        "purpose": purpose,
        "status": "processed",
        "owner": owner,
    }
