"""Strict JSON within limits, and the process that decodes long bodies.

Decoding holds the GIL: in the server's process a long body would stop everybody else's requests. This file
imports the standard library only, because it is also the script of that process:

    bodies.py  --size, limits, body-->  json_process.py  --kind, size, marshalled value or message-->
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
"""Objects and arrays inside each other; deeper ones exhaust the stack of what walks over them."""

REQUEST = struct.Struct("<QQQ")
"""Bytes of the body, most values, most items."""
REPLY = struct.Struct("<BQ")
"""Kind, bytes of what follows."""
VALUE, INVALID, TOO_MANY = range(3)
"""Kinds of replies: a value, or why there is none."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class InvalidJsonError(ValueError):
    """The body is not JSON, or JSON that no client means."""


class TooManyValuesError(ValueError):
    """The body is above a limit on its values."""


def decode(body: bytes, max_values: int, max_items: int) -> Any:
    """Decodes JSON strictly: UTF-8, numbers that floats can hold, no key twice, no half surrogate pairs.

    Args:
        body: the bytes.
        max_values: most objects, arrays and keys.
        max_items: most elements of all arrays and members of all objects together.

    Raises:
        InvalidJsonError: what is wrong and where.
        TooManyValuesError: how many there are.
    """
    _check_values(body, max_values, max_items)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _invalid(f"it is not UTF-8, at byte {error.start}")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        _invalid(f"{error.msg}, at line {error.lineno}, column {error.colno}")
    except RecursionError:
        _invalid(f"it is nested deeper than {MAX_DEPTH} levels")
    except InvalidJsonError:
        raise
    except ValueError:  # a whole number of more digits than Python reads
        _invalid("it has a number that is too long")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        _invalid(f"it is nested deeper than {MAX_DEPTH} levels")
    if _SURROGATE.search(body) and not _is_unicode(value):
        _invalid("it has half of a surrogate pair, which is no character")
    return value


def _check_values(body: bytes, max_values: int, max_items: int) -> None:
    """Counts before anything is made of the body: first with the marks inside texts, which is quick."""
    num_values, num_items = _count(body)
    if num_values <= max_values and num_items <= max_items:
        return
    pieces = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    num_values, num_items = _count(b"".join(pieces[::2]))
    if num_values > max_values:
        raise TooManyValuesError(
            f"the body has {num_values} objects, arrays and keys, this server takes {max_values}"
        )
    if num_items > max_items:
        raise TooManyValuesError(f"the body has more than {num_items} values, this server takes {max_items}")


def _count(body: bytes) -> tuple[int, int]:
    return body.count(b"{") + body.count(b"[") + body.count(b":"), body.count(b",")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                _invalid(f"the key {name[:100]!r} stands twice in one object")
            seen.add(name)
    return found


def _no_constant(name: str) -> NoReturn:
    _invalid(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _invalid(f"the number {text[:40]} is too large")
    return value


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return False
        level = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
    return True


def _invalid(problem: str) -> NoReturn:
    raise InvalidJsonError(f"the body is not valid JSON: {problem}")


# -- The process -------------------------------------------------------------------------------------------


def reply_to(body: bytes, max_values: int, max_items: int) -> tuple[int, bytes]:
    """The kind of a reply, and its bytes."""
    try:
        return VALUE, marshal.dumps(decode(body, max_values, max_items), 2)
    except InvalidJsonError as error:
        return INVALID, str(error).encode("utf-8", "backslashreplace")
    except TooManyValuesError as error:
        return TOO_MANY, str(error).encode()


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Replies to one request after another, until the other side closes."""
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        size, max_values, max_items = REQUEST.unpack(head)
        body = requests.read(size)
        if len(body) < size:
            return
        kind, data = reply_to(body, max_values, max_items)
        replies.write(REPLY.pack(kind, len(data)))
        replies.write(data)
        replies.flush()
        del body, data


if __name__ == "__main__":
    gc.disable()  # JSON has no cycles
    os.nice(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer)
