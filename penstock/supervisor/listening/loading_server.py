"""Answers HTTP clients while the model loads: probes get replies, all other requests 503 with the phase.

A thread of the process that owns the listening socket, because no other process lives from the first moment:
API servers start after the model was downloaded, and are busy while they load their tokenizer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from penstock.config.serve import ServeConfig
from penstock.supervisor.startup.startup_status import StartupStatus

if TYPE_CHECKING:
    from penstock.http.server import HttpServer

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
"""Connections that are open at a time; more get 503. The descriptors of this process are for its children."""
MAX_HELD_BYTES = 16 << 20
"""Bytes of requests that all connections hold together."""
LOADING_MODULES = ("uvloop", "penstock.http.server", "penstock.supervisor.listening.loading_app")
"""What the thread imports."""
_POLL_S = 0.05


class LoadingServer:
    """Serves a listening socket, which it does not own, until :meth:`hand_over`. Use it as a context."""

    def __init__(
        self,
        listener: socket.socket,
        config: ServeConfig,
        status: StartupStatus,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener.dup()
        self._config = config
        self._status = status
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop
        self._http: HttpServer
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._in_thread(lambda: self._http.stop())
        self._thread.join()
        self._listener.close()

    def hand_over(self) -> None:
        """Accept no more connections: those that come wait for an API server. Requests on open connections
        are answered as before, and end them."""
        self._in_thread(lambda: self._http.retire(lambda: True))

    def _in_thread(self, act: Callable[[], None]) -> None:
        """Has the thread do something, and waits until it has; nothing if the thread has ended."""
        while not self._listening.wait(_POLL_S):
            if not self._thread.is_alive():
                return
        done = threading.Event()

        def run() -> None:
            act()
            done.set()

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:  # its loop is closed
            return
        while self._thread.is_alive() and not done.wait(_POLL_S):
            pass

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            import uvloop  # imports take a third of a second, in which the main thread goes on

            uvloop.run(self._serve())
        except Exception:
            log.exception("clients get no replies until the server has started")

    async def _serve(self) -> None:
        from penstock.http.server import HttpServer
        from penstock.http.server_state import Limits
        from penstock.http.sockets.connection_source import ListeningSocket
        from penstock.supervisor.listening.loading_app import LoadingApp

        config = self._config
        limits = Limits(
            header_timeout_s=config.header_timeout,
            keep_alive_timeout_s=config.keep_alive_timeout,
            max_connections=MAX_CONNECTIONS,
            max_header_bytes=config.max_header_bytes,
            max_held_bytes=MAX_HELD_BYTES,
        )
        self._loop = asyncio.get_running_loop()
        self._http = HttpServer(
            LoadingApp(config, self._status),
            ListeningSocket(self._listener, MAX_CONNECTIONS),
            limits,
            tls=self._tls,
            on_listening=self._listening.set,
        )
        self._http.end_connections()  # a client's next request may be for an API server
        await self._http.run_to_the_end()
