"""`check_plot`: checks that matplotlib is installed, for the ``--plot`` options."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.errors import MissingDependencyError


def check_plot() -> None:
    """Check that matplotlib is installed, before the measurement.

    Raises:
        MissingDependencyError: matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("matplotlib", "bench", "--plot")
