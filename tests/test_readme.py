"""The code of the README and docs/getting-started.md runs unchanged."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from support.documents import URL

from penstock.cli import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
GETTING_STARTED = (ROOT / "docs" / "getting-started.md").read_text()
BLOCKS = [
    code
    for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    if URL not in code  # those of a client run in tests/docs/test_code.py
]
NAMES = "generate |chat |encode |rerank |speak |serve |bench |list|warm-cache |quantize |env"
COMMANDS = [
    command
    for page in (README, GETTING_STARTED)
    for command in re.findall(rf"(?:^|\| )\$? ?penstock ((?:{NAMES}).*)$", page, flags=re.MULTILINE)
]


@pytest.mark.parametrize("code", BLOCKS)
def test_python(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 20


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_take_these_flags(line: str) -> None:
    name, *arguments = shlex.split(line, comments=True)
    with cli.make_context("penstock", [name]) as context:
        command = cli.get_command(context, name)
        assert command is not None
        command.make_context(name, arguments, parent=context)


def test_there_is_something_to_check() -> None:
    assert BLOCKS
    assert len(COMMANDS) >= 15
