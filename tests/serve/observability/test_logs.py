"""Formats and levels of the log. Each event is one line, whatever text a client sends."""

from __future__ import annotations

import io
import json
import logging

import pytest

from penstock.serve.config import ServeConfig
from penstock.serve.observability.logs import configure_logging, log_event


def make_log(log_format: str, level: str = "info") -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    configure_logging(ServeConfig(log_format=log_format, log_level=level), stream)
    return logging.getLogger("penstock.serve.test"), stream


def test_logfmt_quotes_values_with_spaces_and_omits_none() -> None:
    logger, stream = make_log("logfmt")
    log_event(logger, logging.INFO, "two words", a=1, b=0.123456, c=None, d="x y", e=[1, "z"], f="", g=True)
    time, _, remainder = stream.getvalue().partition(" ")
    assert time.startswith("time=20")
    assert time.endswith("+00:00")
    assert remainder == 'level=info event="two words" a=1 b=0.1235 d="x y" e="[1, \\"z\\"]" f="" g=true\n'


def test_a_json_log_line_is_one_object_without_none() -> None:
    logger, stream = make_log("json")
    log_event(logger, logging.WARNING, "it", a={"b": [1]}, c=None)
    line = json.loads(stream.getvalue())
    assert line.pop("time")
    assert line == {"level": "warning", "event": "it", "a": {"b": [1]}}


@pytest.mark.parametrize("log_format", ["logfmt", "json"])
@pytest.mark.parametrize("text", ['a\nlevel=error event="x"', "\x1b[2J", "\u2028", "\ud83d", 'a"b=c\\', "é"])
def test_a_client_cannot_forge_a_line(log_format: str, text: str) -> None:
    logger, stream = make_log(log_format)
    log_event(logger, logging.INFO, "request", user=text)
    line = stream.getvalue()
    assert line.isascii()
    assert line.count("\n") == 1
    assert line.removesuffix("\n").isprintable()
    logged_text = json.loads(line)["user"] if log_format == "json" else json.loads(line.partition("user=")[2])
    assert logged_text == text


@pytest.mark.parametrize("log_format", ["logfmt", "json"])
def test_a_traceback_is_part_of_the_line(log_format: str) -> None:
    logger, stream = make_log(log_format)
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("failed")
    assert stream.getvalue().count("\n") == 1
    assert "ValueError: bad" in stream.getvalue()


def test_events_below_the_level_are_not_logged() -> None:
    logger, stream = make_log("logfmt", "warning")
    log_event(logger, logging.INFO, "quiet")
    log_event(logger, logging.ERROR, "loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed file")])
def test_errors_of_the_log_stream_are_ignored(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    class FailingStream(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    configure_logging(ServeConfig(), FailingStream())
    log_event(logging.getLogger("penstock.serve.test"), logging.INFO, "lost")
    assert capfd.readouterr() == ("", "")
