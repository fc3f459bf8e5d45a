"""Examples of property tests: fixed ones by default, many random ones with `--random`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

DEFAULT_EXAMPLES = 50
RANDOM_FACTOR = 10  # times as many examples with `--random`
RANDOM_TIMEOUT = 3600  # seconds that a property test may take with `--random`


def register_profiles() -> None:
    """Register the profiles ``fixed``, loaded by default, and ``random``, loaded by `--random`.

    There are no deadlines and no health checks of time, because machines may be busy.
    """
    fixed_profile = settings(
        max_examples=DEFAULT_EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=True,
        database=None,
    )
    settings.register_profile("fixed", fixed_profile)
    settings.register_profile(
        "random",
        fixed_profile,
        max_examples=DEFAULT_EXAMPLES * RANDOM_FACTOR,
        derandomize=False,
        print_blob=True,
    )
    settings.load_profile("fixed")


def num_examples(count: int) -> int:
    """Return the number of examples for a test that has `count` of them by default."""
    return count * settings().max_examples // DEFAULT_EXAMPLES


def draw_no_constants_of_modules() -> None:
    """Stop Hypothesis from drawing constants that it finds in the source of loaded modules.

    The loaded modules differ between a single test and a full run, so their examples would differ.
    """
    nothing = Constants()
    providers._get_local_constants = lambda: nothing


def mark_property_tests(items: Iterable[pytest.Item]) -> None:
    """Mark property tests as ``random`` and extend their timeout for the additional examples."""
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.random)
        if item.get_closest_marker("random"):
            item.add_marker(pytest.mark.timeout(RANDOM_TIMEOUT))
