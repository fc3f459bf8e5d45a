"""Input of the commands for embeddings models: texts from flags, from a file, or from standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.errors import InputError, TaskMismatchError

if TYPE_CHECKING:
    from penstock.config import PipelineConfig

TASK = "embeddings-generation"
TEXT_KEYS = ("text", "input", "document")
"""The keys of a JSON object that may hold its text, in the order in which they are looked up."""


def check_embeddings_model(config: PipelineConfig, command: str) -> None:
    """Check before the load that the model is an embeddings model.

    Raises:
        TaskMismatchError: the model is not an embeddings model.
    """
    task = config.model.pipeline_task.option
    if task != TASK:
        raise TaskMismatchError(f"penstock {command}", TASK, task)


def read_texts(flag_texts: tuple[str, ...], file: Path | None, flag: str) -> list[str]:
    """Return the texts of the flags, else of the file, else of standard input.

    A file ending in ``.jsonl`` has one JSON string or object per line; any other file has one text per line.
    Lines that are empty or only white space are skipped.

    Args:
        flag_texts: the values of a flag that may be repeated.
        file: the value of ``--file``; ``-`` is standard input.
        flag: the name of the flag in errors, such as ``--text``.

    Raises:
        InputError: there is no text, a text is not valid UTF-8, or a line of a ``.jsonl`` file is malformed.
        click.UsageError: both the flag and ``--file`` are given.
        OSError: the file cannot be read.
    """
    if flag_texts and file is not None:
        raise click.UsageError(f"{flag} and --file are both given: give one of them")
    if flag_texts:
        for text in flag_texts:
            _check_utf8(flag, text)
        return list(flag_texts)
    if file is None or str(file) == "-":
        name, data = "standard input", _standard_input(flag)
    else:
        name, data = str(file), file.read_bytes()
    lines = _lines(name, data)
    if file is not None and file.suffix == ".jsonl":
        texts = [_line_text(name, number, line) for number, line in lines]
    else:
        texts = [line for _, line in lines]
    if not texts:
        raise InputError(f"{name} has no texts: give {flag} TEXT, or one text per line")
    return texts


def _lines(name: str, data: bytes) -> list[tuple[int, str]]:
    """Return the lines that are not empty, with their numbers."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not valid UTF-8, at byte {error.start}") from None
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _line_text(name: str, number: int, line: str) -> str:
    """Return the text of a line of a ``.jsonl`` file."""
    try:
        value: object = json.loads(line)
    except ValueError as error:
        raise InputError(f"{name}, line {number}: is not JSON: {error}") from None
    if isinstance(value, dict):
        value = next((value[key] for key in TEXT_KEYS if key in value), None)
    if not isinstance(value, str):
        keys = ", ".join(TEXT_KEYS)
        raise InputError(f"{name}, line {number}: must be a JSON string, or an object with one of {keys}")
    return value


def _standard_input(flag: str) -> bytes:
    if sys.stdin is None:
        raise InputError(f"there are no texts: give {flag} TEXT, --file FILE, or lines on standard input")
    if sys.stdin.isatty():
        click.echo("penstock: reading one text per line from the terminal; end with Ctrl-D", err=True)
    return sys.stdin.buffer.read()


def _check_utf8(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # Python decodes invalid UTF-8 on the command line to lone surrogates
        raise InputError(f"{name} is not valid UTF-8") from None
