"""Clients that read slower than the server writes."""

from __future__ import annotations

import select
import socket
import threading
from typing import Self

from penstock.bench.errors import BenchError
from penstock.bench.load.http1 import request_bytes
from penstock.bench.load.messages import LoadPlan

WINDOW_BYTES = 4096
"""Receive buffer of each connection: small, so that unread data stays at the server."""
READ_BYTES = 256
READ_INTERVAL_S = 0.1
"""Time between two reads of READ_BYTES on a connection: about one of sixteen events at 15 ms per token."""


class SlowReaders:
    """Connections with one stream each, read by a thread. Use it as a context, which closes them."""

    def __init__(self, plan: LoadPlan, body: str, count: int) -> None:
        """Sends ``body`` on ``count`` connections to the server of ``plan``. Raises BenchError."""
        self.cut = 0
        """Connections that the server closed."""
        self._done = threading.Event()
        self._sockets: dict[int, socket.socket] = {}
        self._reader = threading.Thread(target=self._read_on, name="slow-readers", daemon=True)
        try:
            for _ in range(count):
                self._connect(plan, request_bytes(plan, body.encode()))
        except OSError as error:
            self._close()
            raise BenchError(f"slow readers cannot connect: {error}") from None
        self._reader.start()

    def _connect(self, plan: LoadPlan, request: bytes) -> None:
        connection = socket.socket(socket.AF_INET6 if ":" in plan.host else socket.AF_INET)
        self._sockets[connection.fileno()] = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)
        connection.settimeout(10)
        connection.connect((plan.host, plan.port))
        connection.sendall(request)
        connection.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._reader.join()
        self._close()

    def _close(self) -> None:
        for connection in self._sockets.values():
            connection.close()

    def _read_on(self) -> None:
        poller = select.poll()
        for fd in self._sockets:
            poller.register(fd, select.POLLIN)
        while not self._done.wait(READ_INTERVAL_S):
            for fd, _ in poller.poll(0):
                if not self._read(fd):
                    poller.unregister(fd)
                    self.cut += 1

    def _read(self, fd: int) -> bool:
        """False once the connection is closed."""
        try:
            return bool(self._sockets[fd].recv(READ_BYTES))
        except ConnectionError:
            return False
