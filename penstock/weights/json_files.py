"""`read_json_object`: reads a JSON file of a checkpoint, which must contain one object."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.errors import CheckpointError


def read_json_object(path: Path, error: type[CheckpointError] = CheckpointError) -> dict[str, object]:
    """Return the JSON object in a file.

    Args:
        path: the file.
        error: class of the error to raise, `CheckpointError` or a subclass.

    Raises:
        CheckpointError: the file cannot be read, is not JSON, or does not contain an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as problem:
        raise error(path, f"cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:  # malformed JSON, or bytes that are not UTF-8
        raise error(path, f"is not valid JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise error(path, f"must contain a JSON object, contains a {type(value).__name__}")
    return value
