"""The Ray actor that runs one engine or API server on a machine of a cluster.

The process is the same child process as on the supervisor's own machine, with the same control channel. The
actor forwards the channel's bytes in both directions. In the first line, the
:class:`~penstock.wire.control.Launch`, it sets this machine's directories, process id and listening socket.
At AcceptConnections it leaves clients, whom it answers until then, to the API server. The process ends with
the actor, whatever ends that.
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
from penstock.distribution import build_id
from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL, StartupError
from penstock.http.sockets.listener import listen
from penstock.http.tls import server_context
from penstock.placement.port_claim import claim_port
from penstock.supervisor.children.parent_death import child_command
from penstock.supervisor.listening.loading_server import LoadingServer
from penstock.supervisor.startup.api_server_directories import ApiServerDirectories, api_server_directories
from penstock.supervisor.startup.cluster import traits_of
from penstock.supervisor.startup.file_limit import raise_file_limit
from penstock.supervisor.startup.model_resolution import resolve_model
from penstock.supervisor.startup.run_directory import RunDirectory
from penstock.supervisor.startup.startup_status import STARTING, StartupStatus
from penstock.wire.control import AcceptConnections, Launch, ProcessFailed, decode_for_child, encode
from penstock.wire.coordination import BUILD

CONCURRENCY = 3
"""Concurrent calls of an actor: a read that waits, a write, and one to spare."""
_READ_BYTES = 1 << 16


class ProcessOutput(NamedTuple):
    """Output of the process on its control channel since the last :meth:`ProcessActor.read`."""

    data: bytes
    returncode: int | None
    """Set when the process has exited and all was read; negative for a signal."""


class ProcessActor:
    """Runs one process. Its methods are called by the process's :mod:`~penstock.placement.process_proxy`."""

    def __init__(self) -> None:
        self._owned = contextlib.ExitStack()
        self._channel: socket.socket | None = None
        self._loading_server: LoadingServer | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        self._returncode = EXIT_FATAL
        self._failure = b""

    def start(self, line: bytes, command: Sequence[str] | None = None, listen_on: str | None = None) -> None:
        """Start the process of ``line``, an encoded Launch. ``listen_on`` is the address of this machine on
        which an API server listens, with --port."""
        launch = decode_for_child(line)
        assert isinstance(launch, Launch)
        # The kernel kills a child when the *thread* that started it ends, so this thread waits for the child.
        arguments = launch, command or child_command("penstock.supervisor.children.child_main"), listen_on
        threading.Thread(target=self._run_to_exit, args=arguments, name="keeper", daemon=True).start()
        self._started.wait()

    def read(self) -> ProcessOutput:
        """Wait for output of the process on its control channel, or for its exit."""
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
        """Write one command to the process's control channel; nothing if that is closed, as :meth:`read`
        returns why."""
        if self._loading_server is not None and isinstance(decode_for_child(data), AcceptConnections):
            self._loading_server.hand_over()
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
            fatal = launch.epoch == 0  # a restart would have the same options on the same machine
            self._failure = encode(ProcessFailed(message=f"{os.uname().nodename}: {error}", fatal=fatal))
            self._returncode = EXIT_FATAL if fatal else EXIT_FAILED
        finally:
            self._started.set()
            self._ended.set()

    def _with_local_paths(self, launch: Launch) -> Launch:
        """The launch with this machine's directories and model traits."""
        run_dir = self._owned.enter_context(RunDirectory(None)).path
        engine = launch.role == "engine"
        directories = ApiServerDirectories()
        if launch.role == "api-server":
            directories = self._owned.enter_context(api_server_directories(launch.config, run_dir))
        model = resolve_model(launch.config, run_dir, for_engine=engine)
        return msgspec.structs.replace(
            launch,
            run_dir=run_dir,
            model_dir=model.model_dir,
            tokenizer_dir=model.tokenizer_dir,
            traits=traits_of(launch.config, model) if engine else {BUILD: build_id()},
            response_store_dir=directories.responses,
            weights_dir=directories.weights,
            seal_key=launch.seal_key or directories.seal_key,
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
                # Each process has its own socket, and the kernel spreads connections over them.
                listener = handed_over.enter_context(listen(listen_on, port, shared=True).socket)
                self._loading_server = self._owned.enter_context(self._make_loading_server(launch, listener))
                shared.append(listener.fileno())
                launch = msgspec.structs.replace(launch, listen_fd=listener.fileno())
            process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=shared, stdin=subprocess.DEVNULL
            )
        self._channel.sendall(encode(launch))
        return process

    def _make_loading_server(self, launch: Launch, listener: socket.socket) -> LoadingServer:
        """Answer clients until the supervisor lets the API server take them. What the engines do is known to
        the supervisor alone."""
        status = StartupStatus(launch.engine_count, engines_ready=None)
        status.set_phase(STARTING)
        return LoadingServer(listener, launch.config, status, server_context(launch.config))
