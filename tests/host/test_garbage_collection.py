"""Imports and loads run without the garbage collector, whose state is then restored."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.host.garbage_collection import gc_disabled


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_state_is_restored(was_enabled: bool) -> None:
    if not was_enabled:
        gc.disable()
    with gc_disabled():
        assert not gc.isenabled()
        with gc_disabled():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner one ends within the outer one"
    assert gc.isenabled() == was_enabled


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError), gc_disabled():  # noqa: PT011  # whichever
        raise ValueError
    assert gc.isenabled()


def test_frozen_objects_are_unfrozen_except_earlier_ones() -> None:
    """In a new process, because other code may freeze objects of this one."""
    code = """
import gc
from penstock.host.garbage_collection import gc_disabled
class Node: pass
def cycle():
    node = Node(); node.itself = node
with gc_disabled():
    made = [Node() for _ in range(5000)]
    cycle()
assert gc.get_freeze_count() == 0
assert sum(isinstance(one, Node) for one in gc.get_objects(generation=0)) < 100, "they are in generation 0"
gc.collect()
assert sum(isinstance(one, Node) for one in gc.get_objects()) == 5000, "a cycle is still found"
gc.freeze()
frozen = gc.get_freeze_count()
with gc_disabled():
    pass
assert gc.get_freeze_count() >= frozen - 10
"""
    subprocess.run([sys.executable, "-c", code], check=True)
