"""Files and batches on disk: one JSON object for each, beside the content of files.

STATE_DIR/files/file-ID.json   STATE_DIR/files/file-ID.jsonl   STATE_DIR/batches/batch_ID.json
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from penstock.errors import ConfigError

_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


class ObjectStore:
    """JSON objects by id in one folder. Every method reads or writes the disk: call it in a thread.

    Args:
        folder: the folder; it is created.
        kind: the beginning of the ids.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("state_dir", f"{folder} cannot be used: {error.strerror}") from error

    def new_id(self) -> str:
        """Return a new id."""
        return f"{self._kind}{uuid4().hex}"

    def content(self, name: str) -> Path:
        """Return the path of the content of a file."""
        return self._folder / f"{name}.jsonl"

    def put(self, value: dict[str, Any]) -> None:
        """Store an object under its id. The old object is replaced at once."""
        path = self._path(value["id"])
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(value))
        os.replace(new, path)

    def get(self, name: str, owner: str | None = None) -> dict[str, object] | None:
        """Return an object; None if there is none, or if it has another owner."""
        if not _ID.fullmatch(name) or not name.startswith(self._kind):
            return None
        try:
            value: dict[str, object] = msgspec.json.decode(self._path(name).read_bytes())
        except FileNotFoundError:
            return None
        return value if owner is None or value["owner"] == owner else None

    def delete(self, name: str) -> None:
        """Delete an object and its content."""
        self._path(name).unlink(missing_ok=True)
        self.content(name).unlink(missing_ok=True)

    def all(self, owner: str | None = None) -> list[dict[str, Any]]:
        """Return all objects of an owner, the newest first."""
        names = (path.stem for path in self._folder.glob(f"{self._kind}*.json"))
        found = [value for name in names if (value := self.get(name, owner)) is not None]
        return sorted(found, key=lambda value: (-value["created_at"], value["id"]))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def shown(value: dict[str, object]) -> dict[str, object]:
    """Return an object without the members that only the server uses."""
    return {name: one for name, one in value.items() if name not in ("owner", "results", "failures")}


def file_object(name: str, owner: str, file_name: str, purpose: str, size: int) -> dict[str, object]:
    """Return the object of a file."""
    return {
        "id": name,
        "object": "file",
        "bytes": size,
        "created_at": time.time_ns() // 10**9,
        "filename": file_name,
        "purpose": purpose,
        "status": "processed",
        "owner": owner,
    }
