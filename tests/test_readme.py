"""The Python code of the README, and the commands of the README and docs/getting-started.md."""

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
CODE_BLOCKS = [
    code
    for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    if URL not in code  # tests/docs/test_code.py runs code that needs a server
]
COMMAND_NAMES = "generate |chat |encode |rerank |speak |serve |bench |list|warm-cache |quantize |env"
COMMANDS = [
    command
    for page in (README, GETTING_STARTED)
    for command in re.findall(rf"(?:^|\| )\$? ?penstock ((?:{COMMAND_NAMES}).*)$", page, flags=re.MULTILINE)
]


@pytest.mark.parametrize("code", CODE_BLOCKS)
def test_python_code_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 20


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_accept_their_flags(line: str) -> None:
    name, *arguments = shlex.split(line, comments=True)
    with cli.make_context("penstock", [name]) as context:
        command = cli.get_command(context, name)
        assert command is not None
        command.make_context(name, arguments, parent=context)


def test_the_pages_contain_code_and_commands() -> None:
    assert CODE_BLOCKS
    assert len(COMMANDS) >= 15
