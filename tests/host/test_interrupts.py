"""`deferred_interrupts`: Ctrl-C is delivered when the block ends, so that state stays consistent."""

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


def test_a_second_interrupt_is_delivered_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second Ctrl-C was deferred too")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_the_block_replaces_the_interrupt() -> None:
    with pytest.raises(ZeroDivisionError), deferred_interrupts():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_custom_handler_is_kept_and_a_block_in_a_thread_sets_no_handler() -> None:
    signals = []
    previous_handler = signal.signal(signal.SIGINT, lambda *_: signals.append(1))
    try:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert signals == [1]
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    handlers = []

    def enter() -> None:
        with deferred_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_block_can_deliver_a_pending_interrupt_early() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts() as deliver_pending:  # noqa: PT012
        deliver_pending()
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            steps.append("inside")
        steps.append("after")
        deliver_pending()
        steps.append("not reached")
    assert steps == ["inside", "after"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
