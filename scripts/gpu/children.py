"""Runs a command for a limited time, line by line, and leaves none of its processes behind."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 30
"""Last lines of the output that are kept."""
LINE_CHARACTERS = 1000
READ_BYTES = 1 << 16
POLL_S = 0.1
END_S = 3.0
"""Time for killed processes to end: within a device's driver one may hang for ever."""


@dataclass(frozen=True)
class Ended:
    """How a command ended. ``status``: "done", its exit status or signal, or its limit; ``tail``: its last
    lines."""

    status: str
    seconds: float
    tail: list[str]


def run_child(
    command: Sequence[str],
    seconds: float,
    on_line: Callable[[str], None],
    environment: Mapping[str, str],
) -> Ended:
    """Runs ``command`` in a session of its own, for at most ``seconds``; ``on_line`` gets each line of its
    output and errors at once. Then every process that descends from it is killed."""
    began = time.monotonic()
    tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    def take(line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        tail.append(text[:LINE_CHARACTERS])
        on_line(text)

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    try:
        _read_lines(process, began + seconds, take)
        status = f"killed at its limit of {seconds:.0f} s" if process.poll() is None else ""
    finally:
        end_tree(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        assert process.stdout is not None
        process.stdout.close()
    return Ended(status or _status(process.returncode), time.monotonic() - began, list(tail))


def _read_lines(process: subprocess.Popen[bytes], end: float, take: Callable[[bytes], None]) -> None:
    """Reads until the process has ended, or until ``end``. An unfinished last line counts as one."""
    assert process.stdout is not None
    pipe, rest = process.stdout.fileno(), b""
    while time.monotonic() < end:
        if not select.select([pipe], [], [], POLL_S)[0]:
            if process.poll() is not None:
                break  # another process of the command holds the pipe open
            continue
        data = os.read(pipe, READ_BYTES)
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            take(line)
    if rest:
        take(rest)


def _status(code: int | None) -> str:
    if code is None:
        return "does not end"
    if code == 0:
        return "done"
    return f"exit status {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"


# -- the end of processes

_SUBREAPER, _PARENT_DEATH_SIGNAL = 36, 1
"""Operations of Linux's prctl(2)."""
_libc = ctypes.CDLL(None)


def _prctl(operation: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # another system
        _libc.prctl(operation, value, 0, 0, 0)


def _end_with_parent() -> None:
    """Of a child: SIGTERM when its parent is killed, which then ends nothing."""
    _prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, for instance of a server in a session of its own:
    ``end_tree(os.getpid())`` finds them then."""
    _prctl(_SUBREAPER, 1)


def end_tree(root: int) -> None:
    """Kills a process and all that descends from it; of this process, only what descends from it.

    They are stopped first: what is stopped starts no further processes while the others are found.
    """
    stopped: set[int] = set()
    while found := _tree(root) - stopped - {os.getpid()}:
        for pid in found:
            _send(pid, signal.SIGSTOP)
        stopped |= found
    for pid in stopped:
        _send(pid, signal.SIGKILL)
    end = time.monotonic() + END_S
    for pid in stopped - {root}:
        with contextlib.suppress(ChildProcessError):  # not an orphan that this process has adopted
            while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < end:
                time.sleep(0.01)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _tree(root: int) -> set[int]:
    """``root`` and its descendants, without those that have ended."""
    parents = _parents()
    found, new = set[int](), {root} & parents.keys() | ({root} if root == os.getpid() else set())
    while new:
        found |= new
        new = {pid for pid, parent in parents.items() if parent in new} - found
    return found


def _parents() -> dict[int, int]:
    """The parent of each running process."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_bytes().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                parents[int(path.parent.name)] = int(parent)
    return parents
