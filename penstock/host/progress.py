"""Progress bars for loading and generating, on standard error if it is a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_MIN_LOAD_BYTES = 256 << 20
"""Loads of fewer bytes have no bar, because they end before a user can read it."""


class LoadingProgress:
    """A progress bar for loading or checking a checkpoint, in bytes. The bar is removed at the end.

    Loads of less than 256 MiB have no bar.

    Args:
        num_bytes: total number of bytes of the load.
        title: text before the bar.
    """

    def __init__(self, num_bytes: int, *, title: str = "loading") -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=num_bytes < _MIN_LOAD_BYTES or not _is_terminal(),
        )
        self._task = self._bar.add_task(title, total=num_bytes)

    def advance(self, num_bytes: int) -> None:
        """Advance the bar by the bytes of a tensor, or of a part of a file."""
        if not self._bar.disable:
            self._bar.update(self._task, advance=num_bytes)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class GenerationProgress:
    """A progress bar that counts finished prompts and shows the tokens per second.

    Args:
        num_prompts: total number of prompts.
        shown: whether to draw the bar. Even then, it is drawn only if standard error is a terminal.
    """

    def __init__(self, num_prompts: int, *, shown: bool = True) -> None:
        self._num_tokens = 0
        self._start = time.perf_counter()
        self._bar: Progress | None = None
        if not shown or not _is_terminal():
            return  # creating a bar takes longer than a short generation
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("prompts", total=num_prompts, speed="")

    def advance(self, *, num_tokens: int, num_prompts: int) -> None:
        """Advance the bar by the tokens that a step generated and the prompts that the step finished."""
        if self._bar is None:
            return
        self._num_tokens += num_tokens
        speed = self._num_tokens / max(time.perf_counter() - self._start, 1e-9)
        self._bar.update(self._task, advance=num_prompts, speed=f"{speed:,.0f} tokens/s")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
