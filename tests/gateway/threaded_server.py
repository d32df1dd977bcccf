"""Servers that tests play in a thread of their own."""

from __future__ import annotations

import socketserver
import threading
from typing import Any, Self


class InThread(socketserver.BaseServer):
    """Serves while it is used as a context. Before a server of ``socketserver`` among the base classes."""

    daemon_threads = True

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A gateway may leave at any time."""
