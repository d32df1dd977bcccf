"""Encryption and authentication of connections between hosts: ZMQ's CURVE with one key pair per fleet.

A socket that binds a tcp:// address accepts only peers that present the fleet's key pair; a socket that
connects accepts only a server with it. Traffic is encrypted and authenticated.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger(__name__)

REFUSAL_LOG_INTERVAL_S = 60.0
"""Minimum time between log lines on refused peers; each line has their count."""
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where ZMQ sends authentication requests, within a context; their format is in ZeroMQ RFC 27."""
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ClusterKey:
    """A fleet's key pair; 40 characters each (Z85, ZeroMQ RFC 32)."""

    def __init__(self, secret: str) -> None:
        """Raises ValueError if ``secret`` is not a secret key."""
        try:
            self._public = zmq.curve_public(secret.encode())
        except (zmq.ZMQError, ValueError):
            raise ValueError("not a secret key of 40 characters") from None
        self._secret = secret.encode()

    @classmethod
    def generate(cls) -> ClusterKey:
        return cls(zmq.curve_keypair()[1].decode())

    @property
    def secret(self) -> str:
        return self._secret.decode()

    def secure_server(self, socket: zmq.Socket[bytes]) -> ZapAuthenticator:
        """Makes a socket that will be bound accept only peers with this key pair."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"penstock")
        return ZapAuthenticator(socket, z85.decode(self._public))

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Makes a socket that will be connected accept only a server with this key pair."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)


class ZapAuthenticator:
    """Answers ZMQ's authentication requests, and logs refused peers.

    Runs a thread, since a handshake must not wait for an engine's step. The thread sleeps between handshakes
    and ends with the context of its socket.
    """

    def __init__(self, socket: zmq.Socket[bytes], public: bytes) -> None:
        self._public = public
        self._zap: zmq.Socket[bytes] = socket.context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ADDRESS)
        self._monitor = socket.get_monitor_socket(HANDSHAKE_FAILURES)
        self._refused = 0
        self._logged_at = float("-inf")
        threading.Thread(target=self._run, name="guard", daemon=True).start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    if socket is self._zap:
                        self._answer(self._zap.recv_multipart())
                    else:
                        self._on_monitor_event(self._monitor.recv_multipart())
        except zmq.ContextTerminated:
            self._zap.close()
            self._monitor.close()

    def _answer(self, request: list[bytes]) -> None:
        """``request``: version, request id, domain, address, identity, mechanism, credentials."""
        known = request[5:] == [b"CURVE", self._public]
        status = (b"200", b"") if known else (b"400", b"not the fleet's key")
        self._zap.send_multipart([request[0], request[1], *status, b"", b""])

    def _on_monitor_event(self, message: list[bytes]) -> None:
        """Counts a refused peer, and logs the count unless that was done recently."""
        event = parse_monitor_message(message)
        if not event["event"] & HANDSHAKE_FAILURES:
            return
        self._refused += 1
        now = time.monotonic()
        if now >= self._logged_at + REFUSAL_LOG_INTERVAL_S:
            log.warning(
                "refused %d connections to %s: no peers, or with another --cluster-key-file",
                self._refused,
                event["endpoint"].decode(errors="replace"),
            )
            self._refused, self._logged_at = 0, now


def read_monitor_events(monitor: zmq.Socket[Any], events: int) -> int:
    """The pending events of a monitor that are among ``events``, as one bit mask."""
    seen = 0
    while monitor.poll(0):
        seen |= parse_monitor_message(monitor.recv_multipart())["event"]
    return seen & events
