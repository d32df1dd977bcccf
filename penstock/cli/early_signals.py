"""SIGINT and SIGTERM before a command has handlers of its own: the process ends at once, without a traceback.

KeyboardInterrupt does not do for that time: raised within an import, it ends in tracebacks, and in extension
modules even in a crash. The handlers come with the first module of ours. No code of ours can handle a signal
before that, while Python itself starts: SIGTERM then ends the process by its default action.

What a parent may have taken away comes back first: signals that it blocked, and standard descriptors that it
closed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NEEDED = (*_SIGNALS, signal.SIGHUP, signal.SIGCHLD)
_PROGRAMS = ("-m", "penstock")
"""Base names of ``sys.argv[0]`` while ``python -m`` or the console script imports the program."""


def install() -> None:
    """In the program, not where its modules are imported; ignored signals stay ignored."""
    if os.path.basename(sys.argv[0]) not in _PROGRAMS:
        return
    _open_standard_descriptors()
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NEEDED)
        for signum in _SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, _end)


def _open_standard_descriptors() -> None:
    """Otherwise what is opened next would have the number of one, and children would be given it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def restore() -> None:
    """For commands that clean up after KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(signum: int, frame: FrameType | None) -> None:
    try:
        os.write(2, f"penstock: ended by {signal.Signals(signum).name}\n".encode())
    finally:
        os._exit(128 + signum)
