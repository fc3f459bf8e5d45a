"""The progress bar: drawn on a terminal only, and never on standard output."""

from __future__ import annotations

import io
import sys

import pytest

from penstock.progress import GenerationProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "shown", "drawn"),
    [
        (Terminal, True, True),
        (Terminal, False, False),
        (io.StringIO, True, False),
    ],
)
def test_it_is_drawn_on_a_terminal_only(
    stream: type[io.StringIO],
    shown: bool,
    drawn: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("TERM", "xterm")
    with GenerationProgress(3, shown=shown) as progress:
        progress.advance(num_tokens=70, num_prompts=2)
        progress.advance(num_tokens=30, num_prompts=1)
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert ("3/3" in text and "tokens/s" in text) == drawn
    assert bool(text) == drawn
    assert capsys.readouterr().out == ""
