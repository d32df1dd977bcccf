"""Starts children: as forks of a template process where that is possible, otherwise by their command."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Self

from penstock.module_command import module_command
from penstock.supervisor.children import template_main
from penstock.supervisor.children.child_process import ChildProcess, ForkedProcess
from penstock.supervisor.children.parent_death import child_command
from penstock.supervisor.signals import signals_blocked
from penstock.wire.control import AnyLaunch

IMPORTS_TIMEOUT_S = 60.0
"""How long a template may take for its imports and a fork: they are half a second on an idle machine."""
FORK_TIMEOUT_S = 5.0
"""How long it may take for a fork alone, some milliseconds: the supervisor does nothing else meanwhile."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h


class TemplateGone(Exception):
    """A template has ended, or does not answer."""


class ChildStarter:
    """The children of one main module. Use it as a context, in the main thread."""

    def __init__(
        self,
        module: str,
        preload: Sequence[str] = (),
        *,
        shared: Sequence[str] = (),
        command: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """``preload``: modules that every child needs; none: children are not forked, nor are they with a
        ``command`` of their own. ``shared``: those that this process needs as well. ``environ``: the
        children's environment; the default is this process's."""
        self._module = module
        self._shared = shared
        self._preload = preload if command is None and sys.platform == "linux" else ()
        self.command = command or child_command(module)
        self._environ = environ
        self._template: _Template | None = None

    def __enter__(self) -> Self:
        """Start a template; it imports while this process goes on. Unless this process has other threads it
        is a fork, which has imported much already."""
        if self._preload:
            with contextlib.suppress(OSError):  # no process is left, for example: children say so themselves
                _adopt_orphans()
                if self._environ is None and threading.active_count() == 1:
                    template_main.import_modules(self._shared)
                    self._template = _forked(self._module, self._preload)
                else:
                    self._template = _executed(self._module, self._preload, self._environ)
        return self

    def __exit__(self, *_: object) -> None:
        self._drop_template()

    def start(
        self,
        launch: AnyLaunch,
        on_end: Callable[[], None] = lambda: None,
        *,
        pass_fds: Sequence[int] = (),
    ) -> ChildProcess:
        """Start a child. Raises as :meth:`ChildProcess.start`."""
        if self._template is not None:
            try:
                return ChildProcess.start(launch, self._template.fork_child, on_end, pass_fds=pass_fds)
            except TemplateGone:
                self._drop_template()
        return ChildProcess.start(launch, self.command, on_end, environ=self._environ, pass_fds=pass_fds)

    def _drop_template(self) -> None:
        template, self._template = self._template, None
        if template is not None:
            template.close()


class _Template:
    """A template process."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self._link = link
        self._timeout_s = IMPORTS_TIMEOUT_S
        self._pidfd = os.pidfd_open(pid)

    def fork_child(self, descriptors: Sequence[int]) -> ForkedProcess:
        """A child with these descriptors, the control channel first. Raises OSError, and TemplateGone."""
        try:
            numbers = " ".join(map(str, descriptors)).encode()
            socket.send_fds(self._link, [numbers], descriptors)
            answers = select.poll()  # select() knows no descriptors from 1024 on
            answers.register(self._link, select.POLLIN)
            if not answers.poll(self._timeout_s * 1000):
                raise TemplateGone
            answer = self._link.recv(32)
        except ConnectionError:
            raise TemplateGone from None
        if not answer:
            raise TemplateGone
        self._timeout_s = FORK_TIMEOUT_S
        if (pid := int(answer)) < 0:
            raise OSError(-pid, os.strerror(-pid))
        return ForkedProcess(pid)

    def close(self) -> None:
        """End the process. Its children are not its own, and go on."""
        self._link.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # it had ended, and was reaped as an orphan is
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)


def _forked(module: str, preload: Sequence[str]) -> _Template:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, signals_blocked():
        pid = os.fork()
        if pid == 0:
            template_main.serve(theirs, module, preload)
    return _Template(pid, ours)


def _executed(module: str, preload: Sequence[str], environ: Mapping[str, str] | None) -> _Template:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [*module_command(template_main.__name__), module, ",".join(preload), str(theirs.fileno())]
    with theirs, signals_blocked():
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, env=environ
        )
    process.returncode = 0  # reaped here, not by subprocess
    return _Template(process.pid, ours)


# -- orphans -------------------------------------------------------------------------------------------


def _adopt_orphans() -> None:
    """Make this process the parent of its descendants whose parents have ended. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "orphans cannot be adopted")


def reap_orphans(known: Collection[int]) -> None:
    """Reap adopted processes that have ended: those that children had started, not ``known`` ones."""
    adopts = ctypes.c_int(0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    with contextlib.suppress(ChildProcessError):
        while adopts.value and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            if ended.si_pid in known:  # its own signal is on its way
                return
            os.waitpid(ended.si_pid, 0)
