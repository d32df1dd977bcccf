"""A process's host: the actor that runs one process of the fleet on a machine of a Ray cluster.

The engine or API server is the same child process as on the supervisor's own machine, with the same control
channel; the actor passes the channel's bytes on, both ways, and knows nothing of what they mean but the first
line, the :class:`~penstock.wire.control.Launch`: directories, process ids and the listening socket are this
machine's. The process ends with the actor, whatever ends that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock.config.errors import ConfigError
from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL, StartupError
from penstock.http.listener import listen
from penstock.placement.port_claim import claim_port
from penstock.supervisor.children.module_command import module_command
from penstock.supervisor.startup.cluster import traits_of
from penstock.supervisor.startup.file_limit import raise_file_limit
from penstock.supervisor.startup.model_resolution import resolve_model
from penstock.supervisor.startup.run_directory import RunDirectory
from penstock.wire.control import Launch, ProcessFailed, decode_for_child, encode

CONCURRENCY = 3
"""Calls that an actor answers at the same time: a read that waits, a write, and one to spare."""
_READ_BYTES = 1 << 16


class ProcessOutput(NamedTuple):
    """What the process has said since the last :meth:`ProcessActor.read`."""

    data: bytes
    returncode: int | None
    """Set when it has ended and all was read; negative for a signal."""


class ProcessActor:
    """Runs one process. Its methods are called by the process's :mod:`~penstock.placement.process_proxy`."""

    def __init__(self) -> None:
        self._owned = contextlib.ExitStack()
        self._channel: socket.socket | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        self._returncode = EXIT_FATAL
        self._failure = b""

    def start(self, line: bytes, command: Sequence[str] | None = None, listen_on: str | None = None) -> None:
        """Start the process that ``line``, a Launch, asks for. ``listen_on``: the address of this machine at
        which an API server listens, with --port."""
        launch = decode_for_child(line)
        assert isinstance(launch, Launch)
        # The kernel ends a child with the *thread* that started it, so this one waits until the child's end.
        arguments = launch, command or module_command("penstock.supervisor.children.child_main"), listen_on
        threading.Thread(target=self._run_to_exit, args=arguments, name="keeper", daemon=True).start()
        self._started.wait()

    def read(self) -> ProcessOutput:
        """Waits for more that the process says on its control channel, or for its end."""
        if self._failure:
            data, self._failure = self._failure, b""
            return ProcessOutput(data, None)
        if self._channel is not None:
            with contextlib.suppress(OSError):
                if data := self._channel.recv(_READ_BYTES):
                    return ProcessOutput(data, None)
        self._ended.wait()
        if self._channel is not None:
            self._channel.close()
        return ProcessOutput(b"", self._returncode)

    def write(self, data: bytes) -> None:
        """For the process's control channel. Nothing when it has closed that: :meth:`read` tells why."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.sendall(data)

    def _run_to_exit(self, launch: Launch, command: Sequence[str], listen_on: str | None) -> None:
        try:
            with self._owned:
                process = self._start(self._with_local_paths(launch), command, listen_on)
                self._started.set()
                self._returncode = process.wait()
        except (ConfigError, StartupError, OSError) as error:
            fatal = launch.epoch == 0  # it is the same options on the same machine again
            self._failure = encode(ProcessFailed(message=f"{os.uname().nodename}: {error}", fatal=fatal))
            self._returncode = EXIT_FATAL if fatal else EXIT_FAILED
        finally:
            self._started.set()
            self._ended.set()

    def _with_local_paths(self, launch: Launch) -> Launch:
        """The launch with this machine's directories."""
        run_dir = self._owned.enter_context(RunDirectory(None)).path
        engine = launch.role == "engine"
        model = resolve_model(launch.config, run_dir, for_engine=engine)
        return msgspec.structs.replace(
            launch,
            run_dir=run_dir,
            model_dir=model.model_dir,
            tokenizer_dir=model.tokenizer_dir,
            supervisor_pid=os.getpid(),
            traits=traits_of(launch.config, model) if engine else {},
        )

    def _start(
        self, launch: Launch, command: Sequence[str], listen_on: str | None
    ) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as handed_over:
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            shared = [handed_over.enter_context(theirs).fileno()]
            if listen_on is not None:
                raise_file_limit()
                port = launch.config.port
                self._owned.enter_context(claim_port(listen_on, port, launch.incarnation))
                # a socket of its own for each: the kernel deals connections out
                listener = handed_over.enter_context(listen(listen_on, port, shared=True).socket)
                shared.append(listener.fileno())
                launch = msgspec.structs.replace(launch, listen_fd=listener.fileno())
            process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=shared, stdin=subprocess.DEVNULL
            )
        self._channel.sendall(encode(launch))
        return process
