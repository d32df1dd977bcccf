"""The template process: it has imported what children need, and becomes each of them by a fork (Linux).

A supervisor starts it, as a fork of its own or by ``python -m penstock.supervisor.children.template_main
MODULE MODULES FD``. FD is a socket over which it gets the descriptors of a child and answers with its process
id. The child runs MODULE as ``python -m`` does; it is a child of the supervisor, because the process between
it and this one has ended, and the supervisor adopts orphans. This process has no thread, event loop or ZMQ
context, and ends with its supervisor.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NoReturn

from setproctitle import setproctitle

from penstock.exit_codes import EXIT_FAILED, EXIT_ORPHANED
from penstock.metrics.gc_policy import frozen
from penstock.supervisor.children.parent_death import die_with_parent, exit_with_supervisor
from penstock.supervisor.signals import leave_signals_to_supervisor

MAX_DESCRIPTORS = 8
"""Descriptors of one child."""
_REQUEST_BYTES = 1024
_MANY_THREADS = "OPENBLAS_NUM_THREADS"
_REPARENTED_S = 0.0002


def serve(link: socket.socket, module: str, modules: Sequence[str]) -> NoReturn:
    """Import ``modules``, then fork a child for each request on ``link`` until its other end is closed."""
    code = EXIT_FAILED
    try:
        leave_signals_to_supervisor()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored ones leave nothing to wait for
        die_with_parent()
        supervisor = os.getppid()
        setproctitle("penstock: template")
        _keep_descriptors({link.fileno()})
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        import_modules(modules)
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("an import has started a thread: children cannot be forked")
        while (request := _receive(link))[0]:
            numbers, descriptors = request
            pid = _start(supervisor, module, numbers, descriptors)
            for each in descriptors:
                os.close(each)
            link.send(b"%d" % pid)
        code = EXIT_ORPHANED
    except BaseException:  # noqa: BLE001 - nothing of the supervisor's frames may run here
        traceback.print_exc()
    finally:
        os._exit(code)


def import_modules(modules: Sequence[str]) -> None:
    """Without numpy's threads, which a fork would leave behind."""
    given = os.environ.get(_MANY_THREADS)
    os.environ[_MANY_THREADS] = "1"
    try:
        with frozen():
            for each in modules:
                importlib.import_module(each)
    finally:
        os.environ.pop(_MANY_THREADS)
        if given is not None:
            os.environ[_MANY_THREADS] = given


def _receive(link: socket.socket) -> tuple[list[int], list[int]]:
    """The numbers that a child expects its descriptors to have, and these; none at the end."""
    try:
        data, descriptors, _, _ = socket.recv_fds(link, _REQUEST_BYTES, MAX_DESCRIPTORS)
    except ConnectionResetError:
        return [], []
    return [int(number) for number in data.split()], descriptors


def _start(supervisor: int, module: str, numbers: list[int], descriptors: list[int]) -> int:
    """The process id of a new child; negative: the error number of a fork that failed."""
    reading, writing = os.pipe()
    between = _fork()
    if between == 0:
        child = _fork()
        if child == 0:
            _become(supervisor, module, numbers, descriptors)
        os.write(writing, b"%d" % child)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        if between < 0:
            return between
        os.waitpid(between, 0)
        return int(answer.read())


def _fork() -> int:
    """As os.fork(), but a negative error number for a failure."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or 1)


# -- in the child


def _become(supervisor: int, module: str, numbers: list[int], descriptors: list[int]) -> NoReturn:
    """Run ``module`` as ``python -m`` does, with the descriptors at their numbers; the first is that of the
    control channel."""
    code = EXIT_FAILED
    try:
        between = os.getppid()
        while os.getppid() == between != supervisor:
            time.sleep(_REPARENTED_S)
        if os.getppid() != supervisor:
            os._exit(EXIT_ORPHANED)
        _place(numbers, descriptors)
        exit_with_supervisor(numbers[0])
        sys.argv = [module, str(numbers[0])]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else EXIT_FAILED
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        os._exit(code)


def _place(numbers: list[int], descriptors: list[int]) -> None:
    """Give the descriptors their numbers, and close all others but the standard ones."""
    _keep_descriptors(descriptors)
    high = max(*numbers, *descriptors) + 1
    spare = [os.dup2(each, high + index, inheritable=False) for index, each in enumerate(descriptors)]
    for number, each in zip(numbers, spare, strict=True):
        os.dup2(each, number)
    _keep_descriptors(numbers)


def _keep_descriptors(kept: Collection[int]) -> None:
    """Close every descriptor but these and the standard ones: a copy of the other end of a child's channel
    would hide the child's end."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            with suppress(OSError):  # the one that listed them
                os.close(number)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[3])), sys.argv[1], sys.argv[2].split(","))
