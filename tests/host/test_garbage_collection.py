"""`gc_disabled` disables the garbage collector within a block and then restores its state."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.host.garbage_collection import gc_disabled


@pytest.fixture(autouse=True)
def _enable_collector_afterwards() -> Iterator[None]:
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
        assert not gc.isenabled(), "the end of the inner block enabled the collector"
    assert gc.isenabled() == was_enabled


def test_an_error_in_the_block_enables_the_collector_again() -> None:
    with pytest.raises(ValueError), gc_disabled():  # noqa: PT011  # any ValueError
        raise ValueError
    assert gc.isenabled()


def test_new_objects_leave_the_young_generation_and_frozen_objects_stay_frozen() -> None:
    """Run in a new process: other code may freeze objects of this process."""
    code = """
import gc
from penstock.host.garbage_collection import gc_disabled
class Node: pass
def cycle():
    node = Node(); node.itself = node
with gc_disabled():
    nodes = [Node() for _ in range(5000)]
    cycle()
assert gc.get_freeze_count() == 0
assert sum(isinstance(item, Node) for item in gc.get_objects(generation=0)) < 100, "nodes are in generation 0"
gc.collect()
assert sum(isinstance(item, Node) for item in gc.get_objects()) == 5000, "the cycle is not collected"
gc.freeze()
frozen = gc.get_freeze_count()
with gc_disabled():
    pass
assert gc.get_freeze_count() >= frozen - 10
"""
    subprocess.run([sys.executable, "-c", code], check=True)
