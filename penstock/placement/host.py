"""An engine's host: the actor that runs one engine process on a machine of a Ray cluster.

The engine is the same child process as on the supervisor's own machine, with the same control channel; the
actor passes the channel's bytes on, both ways, and knows nothing of what they mean but the first line, the
:class:`~penstock.wire.control.Launch`: directories and process ids are this machine's. The engine ends with
the actor, whatever ends that.
"""

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ..config.errors import ConfigError
from ..supervisor.cluster import traits_of
from ..supervisor.exits import EXIT_FATAL, StartError
from ..supervisor.model import resolve_model
from ..supervisor.python import module_command
from ..supervisor.run_directory import RunDirectory
from ..wire.control import Failed, Launch, decode_for_child, encode

CONCURRENCY = 3
"""Calls that an actor answers at the same time: a read that waits, a write, and one to spare."""
_READ_BYTES = 1 << 16


class Said(NamedTuple):
    """What the engine has said since the last :meth:`EngineHost.read`."""

    data: bytes
    returncode: int | None
    """Set when it has ended and all was read; negative for a signal."""


class EngineHost:
    """Runs one engine. Its methods are called by the engine's :mod:`~penstock.placement.stand_in`."""

    def __init__(self) -> None:
        self._owned = contextlib.ExitStack()
        self._channel: socket.socket | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        self._returncode = EXIT_FATAL
        self._failure = b""

    def start(self, line: bytes, command: Sequence[str] | None = None) -> None:
        """Start the engine that ``line``, a Launch, asks for."""
        launch = decode_for_child(line)
        assert isinstance(launch, Launch)
        # The kernel ends a child with the *thread* that started it, so this one waits until the child's end.
        arguments = launch, command or module_command("penstock.supervisor.child")
        threading.Thread(target=self._keep, args=arguments, name="keeper", daemon=True).start()
        self._started.wait()

    def read(self) -> Said:
        """Waits for more that the engine says on its control channel, or for its end."""
        if self._failure:
            data, self._failure = self._failure, b""
            return Said(data, None)
        if self._channel is not None:
            with contextlib.suppress(OSError):
                if data := self._channel.recv(_READ_BYTES):
                    return Said(data, None)
        self._ended.wait()
        if self._channel is not None:
            self._channel.close()
        return Said(b"", self._returncode)

    def write(self, data: bytes) -> None:
        """For the engine's control channel. Nothing when it has closed that: :meth:`read` tells why."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.sendall(data)

    def _keep(self, launch: Launch, command: Sequence[str]) -> None:
        try:
            with self._owned:
                process = self._start(launch, command)
                self._started.set()
                self._returncode = process.wait()
        except (ConfigError, StartError, OSError) as error:
            self._failure = encode(Failed(message=f"{os.uname().nodename}: {error}", fatal=True))
        finally:
            self._started.set()
            self._ended.set()

    def _start(self, launch: Launch, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        run_dir = self._owned.enter_context(RunDirectory(None)).path
        model = resolve_model(launch.config, run_dir)
        here = msgspec.structs.replace(
            launch,
            run_dir=run_dir,
            model_dir=model.model_dir,
            tokenizer_dir=model.tokenizer_dir,
            supervisor_pid=os.getpid(),
            traits=traits_of(launch.config, model),
        )
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        self._channel.sendall(encode(here))
        return process
