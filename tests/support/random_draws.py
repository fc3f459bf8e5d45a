"""Examples of property tests: fixed examples by default, more and random examples with `--random`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

DEFAULT_EXAMPLES = 50
RANDOM_FACTOR = 10  # `--random` multiplies the number of examples by this factor
RANDOM_TIMEOUT = 3600  # timeout in seconds with `--random` of a test that is marked `random`


def register_profiles() -> None:
    """Register the profiles ``fixed``, which is the default, and ``random``, which `--random` loads.

    Deadlines and health checks of time are disabled, because machines may be busy.
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
    """Return the number of examples in the current profile for a test with `count` examples by default."""
    return count * settings().max_examples // DEFAULT_EXAMPLES


def disable_module_constants() -> None:
    """Stop Hypothesis from using constants in the source of loaded modules as examples.

    The loaded modules of a single test and of a full run differ, so the examples would differ too.
    """
    no_constants = Constants()
    providers._get_local_constants = lambda: no_constants


def mark_property_tests(items: Iterable[pytest.Item]) -> None:
    """Mark property tests as ``random``, and extend the timeout of all tests with this mark."""
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.random)
        if item.get_closest_marker("random"):
            item.add_marker(pytest.mark.timeout(RANDOM_TIMEOUT))
