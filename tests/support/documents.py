"""Code blocks of the documentation, and a server and an adapter for its examples."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PAGES_WITH_OWN_TEST = {
    "adding-a-model.md",
    "adding-a-task.md",
    "adding-a-back-end.md",
    "adding-an-encoding.md",
    "adding-a-checkpoint-format.md",
    "adding-a-codec.md",
}
PAGES = sorted(
    page for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")] if page.name not in _PAGES_WITH_OWN_TEST
)
EXAMPLES = ROOT / "examples"
URL = "http://127.0.0.1:8000"
"""Address of the server in the documentation."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def needs_server(self) -> bool:
        return URL in self.code


def code_blocks(*languages: str) -> list[Block]:
    """Return the code blocks of `PAGES` that have one of the languages."""
    return [block for page in PAGES for block in _parse_blocks(page) if block.language in languages]


def _parse_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCE.finditer(text):
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])


def shell_commands(block: Block) -> list[str]:
    """Return the commands of a console session: the lines that begin with ``$ ``, with continuations."""
    joined_lines = block.code.replace("\\\n", " ")
    return [line[2:] for line in joined_lines.splitlines() if line.startswith("$ ")]


def parse_curl(command: str) -> tuple[str, str, dict[str, Any] | None]:
    """Return (method, path, JSON body) of a curl command."""
    words = shlex.split(command, comments=True)
    (address,) = [word for word in words if word.startswith("http")]
    body = words[words.index("-d") + 1] if "-d" in words else None
    return (
        "GET" if body is None else "POST",
        address.removeprefix(URL),
        None if body is None else json.loads(body),
    )


def write_adapter(folder: Path, seed: int = 0) -> Path:
    """Write a PEFT directory for the demo model, with the code of ``examples/lora.py``."""
    adapter_path = runpy.run_path(str(EXAMPLES / "lora.py"))["write_adapter"](folder, seed=seed)
    assert isinstance(adapter_path, Path)
    return adapter_path


@contextmanager
def running_server(folder: Path, *flags: str) -> Iterator[str]:
    """Run ``penstock serve`` in a separate process and yield its URL. Asserts that its exit status is 0."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", *flags]
    with log.open("w") as errors, subprocess.Popen(command, cwd=folder, stderr=errors) as process:
        try:
            yield _wait_for_url(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server logs its address, and return the address."""
    while True:
        match = re.search(r"serving \S+ at (\S+) \(ready", log.read_text())
        if match:
            return match[1]
        assert process.poll() is None, log.read_text()
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
