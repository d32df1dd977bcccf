"""Ends a child when its supervisor ends, however that happens."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

from penstock.exit_codes import EXIT_ORPHANED
from penstock.module_command import module_command

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def child_command(module: str, python: str | None = None) -> list[str]:
    """The command of a child with the main module ``module``; its last argument, which is to be added, is the
    descriptor of the control channel. The child ends with its supervisor from its first moment on: its
    imports take a second on a busy machine. ``python``: see :func:`module_command`."""
    guard = f"from {__name__} import exit_with_supervisor; exit_with_supervisor(int(sys.argv[-1]))"
    return module_command(module, first=guard, python=python)


def exit_with_supervisor(control_fd: int) -> None:
    """End this process at once when its supervisor, its parent, ends or has ended.

    A thread waits for the other end of the control channel to close, which works everywhere and while the
    main thread is busy. On Linux the kernel sends SIGKILL as well: when the *thread* that started this
    process ends, which is why the supervisor starts its children from its main thread.
    """
    die_with_parent()
    threading.Thread(target=_wait_for_hangup, args=(control_fd,), name="orphan-guard", daemon=True).start()


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that is its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wait_for_hangup(control_fd: int) -> None:
    poll = select.poll()
    poll.register(control_fd, 0)  # hang-ups are always reported
    events = 0
    while not events & (select.POLLHUP | select.POLLERR):
        for _, events in poll.poll():
            if events & select.POLLNVAL:  # closed here: this process ends with an exit code of its own
                return
    os._exit(EXIT_ORPHANED)
