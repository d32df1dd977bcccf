"""What each signal asks of the supervisor; with processes and terminals it runs in test_main.py."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from penstock.supervisor import signals
from penstock.supervisor.signals import (
    Interrupted,
    SignalReceiver,
    SignalRequest,
    handlers_restored,
    interruptible,
)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with handlers_restored():
        yield


@pytest.mark.parametrize(
    ("terminal_before", "terminal_now", "nohup", "request_"),
    [
        (False, False, False, SignalRequest.ROLLING_RESTART),
        (True, True, False, SignalRequest.ROLLING_RESTART),
        (True, False, False, SignalRequest.SHUT_DOWN),
        (True, True, True, SignalRequest.ROLLING_RESTART),
        (True, False, True, SignalRequest.NOTHING),
    ],
)
def test_what_sighup_asks_for(
    monkeypatch: pytest.MonkeyPatch,
    terminal_before: bool,
    terminal_now: bool,
    nohup: bool,
    request_: SignalRequest,
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    monkeypatch.setattr(signals, "_has_controlling_terminal", lambda: terminal_before)
    receiver = SignalReceiver()
    monkeypatch.setattr(signals, "_has_controlling_terminal", lambda: terminal_now)
    assert receiver.request(signal.SIGHUP) is request_
    assert receiver.request(signal.SIGTERM) is SignalRequest.SHUT_DOWN
    assert receiver.request(signal.SIGINT) is SignalRequest.SHUT_DOWN
    assert receiver.request(signal.SIGCHLD) is SignalRequest.REAP


def test_sighup_waits_for_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it interrupts what is prepared only if the terminal was closed."""
    monkeypatch.setattr(signals, "_has_controlling_terminal", lambda: True)
    with interruptible():
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        with SignalReceiver() as receiver:
            assert receiver.receive() == [signal.SIGHUP]
    with interruptible():
        signal.raise_signal(signal.SIGHUP)
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with interruptible():
        monkeypatch.setattr(signals, "_has_controlling_terminal", lambda: False)
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGHUP)


def test_sighup_that_waits_is_no_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would have it handled again, and again."""
    stop, blocked, block = threading.Event(), [], signal.pthread_sigmask
    threads = [threading.Thread(target=stop.wait) for _ in range(4)]
    monkeypatch.setattr(signals, "_has_controlling_terminal", lambda: True)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *given: [blocked.append(given), block(*given)][1])
    for thread in threads:
        thread.start()
    try:
        with interruptible():
            signal.raise_signal(signal.SIGHUP)
            threads[0].join(0.1)  # they may run
            assert len(blocked) == 1
            assert signal.SIGHUP in signal.sigpending()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_signals_are_received_in_order() -> None:
    with SignalReceiver() as receiver:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        assert receiver.pending
        assert receiver.receive() == [signal.SIGTERM, signal.SIGHUP]
        assert not receiver.pending
        assert receiver.receive() == []


def test_a_signal_behind_a_storm_of_others_is_received() -> None:
    """The wake-up socket has room for some hundred."""
    with SignalReceiver() as receiver:
        for _ in range(2000):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        assert receiver.receive() == [signal.SIGHUP, signal.SIGTERM]
        assert receiver.receive() == []


def test_sighup_without_descriptors_is_no_closed_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_has_controlling_terminal", lambda: True)
    receiver = SignalReceiver()
    monkeypatch.undo()

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    assert receiver.request(signal.SIGHUP) is SignalRequest.ROLLING_RESTART


def test_signals_that_follow_an_interruption_do_not_interrupt_the_clean_up() -> None:
    cleaned = []

    def clean_up() -> None:
        for _ in range(50):
            signal.raise_signal(signal.SIGTERM)
        cleaned.append(True)

    with contextlib.suppress(Interrupted), interruptible(), ExitStack() as owned:
        owned.callback(clean_up)
        signal.raise_signal(signal.SIGTERM)
    assert cleaned


def test_a_signal_interrupts_the_block_and_nothing_after_it() -> None:
    with pytest.raises(Interrupted) as interrupted, interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert interrupted.value.signum == signal.SIGTERM
    signal.raise_signal(signal.SIGTERM)
