"""What the ``--plot`` options of ``penstock bench`` share."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.errors import MissingDependencyError


def check_plot() -> None:
    """Raise before anything is measured if matplotlib is not installed.

    Raises:
        MissingDependencyError: matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("matplotlib", "bench", "--plot")
