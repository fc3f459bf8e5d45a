"""Strict decoding of JSON with limits, and the process that decodes long bodies.

Decoding holds the GIL. In the server's process, the decoding of a long body would block all other requests.
This file is also the script of the decoding process and therefore imports the standard library only:

    json_decoder.py  --request header, body-->                             json_process.py
    json_decoder.py  <--reply header, marshalled value or error message--  json_process.py
"""

from __future__ import annotations

import gc
import json
import marshal
import math
import os
import re
import struct
import sys
from typing import Any, BinaryIO, NoReturn

MAX_DEPTH = 64
"""Maximum nesting of objects and arrays. Much deeper nesting would overflow the stack of recursive code."""

REQUEST_HEADER = struct.Struct("<QQQ")
"""Bytes of the body, maximum number of values, maximum number of items."""
REPLY_HEADER = struct.Struct("<BQ")
"""Kind of the reply, bytes of the marshalled value or error message that follows."""
DECODED, INVALID_JSON, TOO_MANY_VALUES = range(3)
"""Kinds of replies: the decoded value, an `InvalidJsonError`, a `TooManyValuesError`."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class InvalidJsonError(ValueError):
    """The body is not strict JSON."""


class TooManyValuesError(ValueError):
    """The body has more values or items than the limit."""


def decode(body: bytes, max_values: int, max_items: int) -> Any:
    """Decode strict JSON: UTF-8, finite numbers, no duplicate keys, no unpaired surrogates, limited nesting.

    Args:
        body: the bytes.
        max_values: maximum number of objects, arrays and keys.
        max_items: maximum number of commas between array elements and between object members.

    Raises:
        InvalidJsonError: the body is not strict JSON. The message contains the error and its position.
        TooManyValuesError: a limit is exceeded. The message contains the number of values.
    """
    _check_values(body, max_values, max_items)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _raise_invalid(f"it is not UTF-8, at byte {error.start}")
    try:
        value = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_reject_constant, parse_float=_finite_number
        )
    except json.JSONDecodeError as error:
        _raise_invalid(f"{error.msg}, at line {error.lineno}, column {error.colno}")
    except RecursionError:
        _raise_invalid(f"it is nested deeper than {MAX_DEPTH} levels")
    except InvalidJsonError:
        raise
    except ValueError:  # an integer has more digits than Python's int() converts
        _raise_invalid("a number has too many digits")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_nested_deeper(value, MAX_DEPTH):
        _raise_invalid(f"it is nested deeper than {MAX_DEPTH} levels")
    if _SURROGATE.search(body) and not _is_utf8_encodable(value):
        _raise_invalid("it contains an unpaired surrogate")
    return value


def _check_values(body: bytes, max_values: int, max_items: int) -> None:
    """Check the limits before decoding.

    The first count is fast, but it includes punctuation inside strings. If the first count exceeds a limit,
    the second count omits strings.
    """
    num_values, num_items = _count_punctuation(body)
    if num_values <= max_values and num_items <= max_items:
        return
    parts = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    num_values, num_items = _count_punctuation(b"".join(parts[::2]))  # parts[1::2] are strings
    if num_values > max_values:
        raise TooManyValuesError(
            f"the body has {num_values} objects, arrays and keys; the limit is {max_values}"
        )
    if num_items > max_items:
        raise TooManyValuesError(f"the body has more than {num_items} values; the limit is {max_items}")


def _count_punctuation(body: bytes) -> tuple[int, int]:
    """Return the number of ``{``, ``[`` and ``:``, and the number of commas."""
    return body.count(b"{") + body.count(b"[") + body.count(b":"), body.count(b",")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen_keys: set[str] = set()
        for name, _ in pairs:
            if name in seen_keys:
                _raise_invalid(f"the key {name[:100]!r} occurs twice in one object")
            seen_keys.add(name)
    return members


def _reject_constant(name: str) -> NoReturn:
    _raise_invalid(f"{name} is not a JSON number")


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _raise_invalid(f"the number {text[:40]} is too large")
    return value


def _is_utf8_encodable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_nested_deeper(value: object, max_depth: int) -> bool:
    level: list[object] = [value]
    for _ in range(max_depth + 1):
        parents = [item for item in level if isinstance(item, dict | list)]
        if not parents:
            return False
        level = [
            child for parent in parents for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return True


def _raise_invalid(problem: str) -> NoReturn:
    raise InvalidJsonError(f"the body is not valid JSON: {problem}")


# -- The process -------------------------------------------------------------------------------------------


def reply_to(body: bytes, max_values: int, max_items: int) -> tuple[int, bytes]:
    """Decode a body. Return the kind of the reply, and the marshalled value or the error message."""
    try:
        return DECODED, marshal.dumps(decode(body, max_values, max_items), 2)
    except InvalidJsonError as error:
        return INVALID_JSON, str(error).encode("utf-8", "backslashreplace")
    except TooManyValuesError as error:
        return TOO_MANY_VALUES, str(error).encode()


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until the input ends. A request that is cut off has no reply."""
    while len(header := requests.read(REQUEST_HEADER.size)) == REQUEST_HEADER.size:
        num_bytes, max_values, max_items = REQUEST_HEADER.unpack(header)
        body = requests.read(num_bytes)
        if len(body) < num_bytes:
            return
        reply_kind, data = reply_to(body, max_values, max_items)
        replies.write(REPLY_HEADER.pack(reply_kind, len(data)))
        replies.write(data)
        replies.flush()
        del body, data


if __name__ == "__main__":
    gc.disable()  # JSON values have no reference cycles
    os.nice(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer)
