"""Encryption and authentication of connections between hosts: ZMQ's CURVE with one key pair per fleet.

A socket that binds a tcp:// address accepts only peers that present the fleet's key pair; a socket that
connects accepts only a server with it. Traffic is encrypted and authenticated.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from penstock.logging_setup import RateLimitedLog
from penstock.wire.handshakes import HandshakeLimit

log = logging.getLogger(__name__)

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where ZMQ sends authentication requests, within a context; their format is in ZeroMQ RFC 27."""
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS_PER_TURN = 64
"""Events read before excess connections are closed: a flood must not put that off."""
_GUARD_EVENTS = HANDSHAKE_FAILURES | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


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
        """Make a socket that will be bound accept only peers with this key pair."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"penstock")
        return ZapAuthenticator(socket, z85.decode(self._public))

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that will be connected accept only a server with this key pair."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)


class ZapAuthenticator:
    """Answers ZMQ's authentication requests, logs refused peers, and bounds how many are not authenticated
    yet.

    Runs a thread, since a handshake must not wait for an engine's step. The thread sleeps between handshakes
    and ends with the context of its socket.
    """

    def __init__(self, socket: zmq.Socket[bytes], public: bytes) -> None:
        self._public = public
        self._zap: zmq.Socket[bytes] = socket.context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ADDRESS)
        self._monitor = socket.get_monitor_socket(_GUARD_EVENTS)
        self._handshakes = HandshakeLimit()
        self._log = RateLimitedLog(log)
        self._disconnects = 0
        threading.Thread(target=self._run, name="guard", daemon=True).start()

    @property
    def disconnects(self) -> int:
        """Connections that have ended so far."""
        return self._disconnects

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
                        self._read_monitor()
        except zmq.ContextTerminated:
            self._zap.close()
            self._monitor.close()

    def _answer(self, request: list[bytes]) -> None:
        """``request``: version, request id, domain, address, identity, mechanism, credentials."""
        known = request[5:] == [b"CURVE", self._public]
        status = (b"200", b"") if known else (b"400", b"not the fleet's key")
        self._zap.send_multipart([request[0], request[1], *status, b"", b""])

    def _read_monitor(self) -> None:
        """Read the pending events first, so that a descriptor whose number was reused is not mistaken."""
        for _ in range(_EVENTS_PER_TURN):
            if not self._monitor.poll(0):
                break
            self._on_event(parse_monitor_message(self._monitor.recv_multipart()))
        if closed := self._handshakes.close_excess():
            self._log("excess", "too many connections without a key: the oldest are closed, here %d", closed)

    def _on_event(self, event: Any) -> None:
        match event["event"]:
            case zmq.EVENT_ACCEPTED:
                self._handshakes.on_accepted(event["value"])
            case zmq.EVENT_DISCONNECTED:
                self._disconnects += 1
                self._handshakes.on_closed(event["value"])
            case kind if kind & HANDSHAKE_FAILURES:
                address = event["endpoint"].decode(errors="replace")
                self._log(
                    "refused",
                    "refused a connection to %s: no peer, or one with another --cluster-key-file",
                    address,
                )


def read_monitor_events(monitor: zmq.Socket[Any], events: int) -> int:
    """The pending events of a monitor that are among ``events``, as one bit mask."""
    seen = 0
    while monitor.poll(0):
        seen |= parse_monitor_message(monitor.recv_multipart())["event"]
    return seen & events
