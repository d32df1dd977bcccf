"""Accepts the connections that wait on a listening socket, in API servers, the gateway and the supervisor."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator

from penstock.exit_codes import is_exhausted
from penstock.logging_setup import RateLimitedLog

RETRY_S = 1.0
"""Seconds without accepting after the system had no descriptor or memory for another connection."""

log = logging.getLogger(__name__)
_rarely = RateLimitedLog(log, logging.ERROR)


def accept_waiting(
    listener: socket.socket, most: int, on_exhausted: Callable[[], None]
) -> Iterator[socket.socket]:
    """Up to ``most`` waiting connections of a listener that does not block.

    ``on_exhausted`` is called if the system has no descriptor or memory for another one, which the log has
    once a minute: accept again after RETRY_S.
    """
    for _ in range(most):
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if not is_exhausted(error.errno):
                continue  # this connection is broken already, see accept(2)
            _rarely("accept", "cannot accept connections: %s; trying again", os.strerror(error.errno or 0))
            on_exhausted()
            return
        yield connection
