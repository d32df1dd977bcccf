"""All signal handling of ``penstock serve``: SIGINT, SIGTERM, SIGHUP and SIGCHLD; stray ones do nothing.

SIGINT and SIGTERM shut the server down. SIGHUP starts a rolling restart, unless it comes because the
terminal was closed: then it shuts the server down too. Children leave all three to the supervisor.
``penstock gateway`` shares :class:`Terminal` and :func:`handlers_restored`.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Self

TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process by default, as terminals and service managers send them to a whole group."""

STRAY_SIGNALS = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGIO,
)
"""Signals that mean nothing to any process, and would end it by default."""
HANDLER_STACK_BYTES = 1 << 18
"""Of the stack on which handlers run. A frame has the CPU's registers, 11 KiB on the largest of today; all
signals of a stopped process begin at once when it goes on, each on top of the others."""
RAISE_INTERVAL_S = 0.5
"""Signals that follow an interruption within this time are taken for the same."""

# -- supervisor, before its event loop -----------------------------------------------------------------


class Interrupted(BaseException):
    """A termination signal came before there was anything to drain."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """Stray signals do nothing in the block. Restores the handlers of all signals at its end."""
    handled = (*TERMINATION_SIGNALS, *STRAY_SIGNALS, signal.SIGCHLD)
    before = {signum: signal.getsignal(signum) for signum in handled}
    for signum in STRAY_SIGNALS:
        signal.signal(signum, _do_nothing)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Termination signals raise Interrupted in the block, so that its context managers clean up. SIGHUP waits
    for a :class:`SignalReceiver`, unless it comes because the terminal was closed.

    After the block they do nothing, so that they do not interrupt the clean-up of outer blocks; nor do they
    for RAISE_INTERVAL_S after one that has.
    """
    quiet_until, terminal = 0.0, Terminal()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal quiet_until
        if signum == signal.SIGHUP and not terminal.was_closed():
            signal.pthread_sigmask(signal.SIG_BLOCK, (signum,))
            # It is pending from here on; sent to the process, a library's thread would take it.
            signal.pthread_kill(threading.get_ident(), signum)
            return
        if time.monotonic() >= quiet_until:  # an exception in a callback may have been lost: not only once
            quiet_until = time.monotonic() + RAISE_INTERVAL_S
            raise Interrupted(signum)

    # nohup ignores SIGHUP
    handled = [signum for signum in TERMINATION_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]
    for signum in handled:
        signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum in handled:
            signal.signal(signum, _do_nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)


# -- the terminal --------------------------------------------------------------------------------------


class Terminal:
    """The controlling terminal, by which SIGHUP says that it was closed; without one it is an order.

    Make it when the process starts, before SIGHUP has a handler.
    """

    def __init__(self) -> None:
        self._existed = _has_controlling_terminal()
        self.ends_process = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        """Whether its end is to end the process; nohup ignores SIGHUP, which may still be an order."""

    def was_closed(self) -> bool:
        return self._existed and not _has_controlling_terminal()


def _has_controlling_terminal() -> bool:
    """Whether this process has a controlling terminal; one that was closed does not count."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # then it cannot be told
    return True


# -- supervisor, in its event loop ---------------------------------------------------------------------


class SignalRequest(enum.Enum):
    """What a signal asks of the supervisor."""

    SHUT_DOWN = enum.auto()
    ROLLING_RESTART = enum.auto()
    REAP = enum.auto()
    """A child has exited."""
    NOTHING = enum.auto()


class SignalReceiver:
    """Notes signals and wakes the event loop, so that they are handled between events, never within one.

    However many come, none is lost: equal ones that wait count as one. Make it in the main thread when the
    supervisor starts, and use it as a context. The handlers stay after the block, so that a late signal does
    not interrupt the caller's clean-up.
    """

    def __init__(self) -> None:
        self._terminal = Terminal()
        self._pending: dict[int, None] = {}
        """Signals that have come since the last :meth:`receive`, in order."""

    def __enter__(self) -> Self:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for signum in (*TERMINATION_SIGNALS, signal.SIGCHLD):
            if signum in (signal.SIGCHLD, signal.SIGHUP) or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._pending[signum] = None

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        self._read.close()
        self._write.close()

    def fileno(self) -> int:
        """Readable when signals have come."""
        return self._read.fileno()

    @property
    def pending(self) -> bool:
        """Whether signals have come; the socket may have had no room for the byte of each."""
        return bool(self._pending)

    def receive(self) -> list[int]:
        """The numbers of the signals that have come, each once, in order."""
        with contextlib.suppress(BlockingIOError):
            while self._read.recv(4096):
                pass
        received, self._pending = self._pending, {}
        return list(received)

    def request(self, signum: int) -> SignalRequest:
        """What ``signum`` asks for, now."""
        if signum == signal.SIGCHLD:
            return SignalRequest.REAP
        if signum == signal.SIGHUP:
            if not self._terminal.was_closed():
                return SignalRequest.ROLLING_RESTART
            if not self._terminal.ends_process:
                return SignalRequest.NOTHING
        return SignalRequest.SHUT_DOWN


# -- children ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Termination and stray signals stay pending in the block. A child that is started in it inherits the
    mask, and unblocks the signals once it has handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*TERMINATION_SIGNALS, *STRAY_SIGNALS))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _SignalStack(ctypes.Structure):
    _fields_ = (("ss_sp", ctypes.c_void_p), ("ss_flags", ctypes.c_int), ("ss_size", ctypes.c_size_t))


_handler_stack = ctypes.create_string_buffer(0)


def dump_tracebacks_of_crashes() -> None:
    """Write the tracebacks of all threads to standard error when this process crashes. Call it in the main
    thread.

    faulthandler gives that thread a stack for handlers of 16 KiB, on which Python's handlers of all signals
    then run: five signals at once overflow it, and end the process. This gives it a larger one (Linux).
    """
    global _handler_stack
    faulthandler.enable()
    if sys.platform == "linux":
        _handler_stack = ctypes.create_string_buffer(HANDLER_STACK_BYTES)
        stack = _SignalStack(ctypes.addressof(_handler_stack), 0, HANDLER_STACK_BYTES)
        ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None)


def leave_signals_to_supervisor() -> None:
    """In a child: termination signals do nothing, the supervisor alone decides what follows; nor do stray
    ones.

    Handlers that do nothing, not SIG_IGN: programs that this process starts get the default back.
    """
    ignored = (*TERMINATION_SIGNALS, *STRAY_SIGNALS)
    for signum in ignored:
        signal.signal(signum, _do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """The signal interrupts nothing."""
