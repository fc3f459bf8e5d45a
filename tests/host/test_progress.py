"""Progress bars are drawn on a terminal only, and never on standard output."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from support.tiny_llm import write_tiny_llm

from penstock import LLM
from penstock.host import progress
from penstock.host.progress import GenerationProgress, LoadingProgress
from penstock.weights import Weights


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "is_enabled", "is_drawn"),
    [
        (Terminal, True, True),
        (Terminal, False, False),
        (io.StringIO, True, False),
    ],
)
def test_the_generation_bar_is_drawn_on_a_terminal_if_it_is_enabled(
    stream: type[io.StringIO],
    is_enabled: bool,
    is_drawn: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("TERM", "xterm")
    with GenerationProgress(3, shown=is_enabled) as progress:
        progress.advance(num_tokens=70, num_prompts=2)
        progress.advance(num_tokens=30, num_prompts=1)
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert ("3/3" in text and "tokens/s" in text) == is_drawn
    assert bool(text) == is_drawn
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("stream", "num_bytes", "is_drawn"),
    [(Terminal, 1 << 30, True), (Terminal, 1 << 20, False), (io.StringIO, 1 << 30, False)],
    ids=["terminal", "small", "file"],
)
def test_loading_progress_is_shown_on_a_terminal_if_the_weights_are_large(
    stream: type[io.StringIO],
    num_bytes: int,
    is_drawn: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("TERM", "xterm")
    with LoadingProgress(num_bytes) as loading:
        loading.advance(num_bytes // 2)
        loading.advance(num_bytes // 2)
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert ("loading" in text and "1.0/1.0 GiB" in text) == is_drawn
    assert bool(text) == is_drawn
    assert capsys.readouterr().out == ""


def test_a_load_advances_the_bar_by_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_llm(tmp_path / "tiny")
    monkeypatch.setattr(progress, "_MIN_LOAD_BYTES", 0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    sizes: list[int] = []
    monkeypatch.setattr(LoadingProgress, "advance", lambda self, num_bytes: sizes.append(num_bytes))
    LLM(str(folder)).close()
    assert sum(sizes) == Weights.open(folder).num_bytes
    assert len(sizes) == len(Weights.open(folder).names)
    assert "loading" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_progress_bars_do_not_fail_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with LoadingProgress(1 << 30) as loading, GenerationProgress(1) as generating:
        loading.advance(1)
        generating.advance(num_tokens=1, num_prompts=1)
