"""The log: one line per event, as logfmt or JSON, on standard error."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

from penstock.serve.config import ServeConfig


def log_event(log: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Log an event with its fields. Fields with the value None are omitted."""
    if log.isEnabledFor(level):
        log.log(level, event, extra={"fields": fields})


class LineFormatter(logging.Formatter):
    """Formats lines as logfmt (``key=value key="two words"``) or JSON. Escapes line ends in values."""

    def __init__(self, log_format: str) -> None:
        super().__init__()
        self._log_format = log_format

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        present_fields = {name: value for name, value in fields.items() if value is not None}
        if self._log_format == "json":
            return json.dumps(present_fields, default=str)
        return " ".join(f"{name}={_logfmt(value)}" for name, value in present_fields.items())


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines to a stream. Drops lines that cannot be written, for example to a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore OSError and ValueError, which the stream raises. Report other errors to standard error."""
        if not isinstance(sys.exception(), OSError | ValueError):  # ValueError: the stream is closed
            super().handleError(record)


def print_notice(line: str) -> None:
    """Print a line to standard error. Ignores errors of the stream."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)


def configure_logging(config: ServeConfig, stream: TextIO | None = None) -> None:
    """Write the log of Penstock and uvicorn's warnings and errors to a stream, by default standard error."""
    handler = _Handler(stream if stream is not None else sys.stderr)
    handler.setFormatter(LineFormatter(config.log_format))
    for name in ("penstock", "uvicorn.error"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(config.log_level.upper() if name == "penstock" else "WARNING")
        log.propagate = False


def _logfmt(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    is_plain = text.isascii() and text.isprintable() and not any(letter in text for letter in ' "=\\')
    return text if is_plain and text else json.dumps(text)
