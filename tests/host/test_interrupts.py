"""Ctrl-C while bookkeeping is half done."""

from __future__ import annotations

import signal
import threading

import pytest

from penstock.host.interrupts import deferred_interrupts


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        steps.append("after")
    assert steps == ["after"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_passes_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second Ctrl-C was held back too")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_precedes_the_interrupt() -> None:
    with pytest.raises(ZeroDivisionError), deferred_interrupts():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_handlers_and_threads_are_left_alone() -> None:
    caught = []
    before = signal.signal(signal.SIGINT, lambda *_: caught.append(1))
    try:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert caught == [1]
    finally:
        signal.signal(signal.SIGINT, before)
    entered = []

    def enter() -> None:
        with deferred_interrupts():
            entered.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [signal.default_int_handler]


def test_a_long_block_can_deliver_an_interrupt_in_between() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts() as let_through:  # noqa: PT012
        let_through()
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            steps.append("inside")
        steps.append("after")
        let_through()
        steps.append("too late")
    assert steps == ["inside", "after"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
