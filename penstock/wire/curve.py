"""CURVE between hosts: one key pair, which every process of a fleet has and nobody else.

Whoever binds a tcp:// address serves with the pair and lets in only peers that present the same pair; whoever
connects presents it and talks to nobody without it. Traffic is encrypted and cannot be changed on its way.
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
"""Refused strangers are logged once in this time, with their number."""
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where ZMQ asks whom to let in, within a context: ZeroMQ RFC 27, as is the form of question and answer."""
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ClusterKey:
    """A fleet's key pair; 40 characters each (Z85, ZeroMQ RFC 32)."""

    def __init__(self, secret: str) -> None:
        """Raises ValueError for what is no secret key."""
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
        """Have ``socket``, which is to be bound, let in only those with this pair. To be started before."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"penstock")
        return ZapAuthenticator(socket, z85.decode(self._public))

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Have ``socket``, which is to be connected, talk to those with this pair alone."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)


class ZapAuthenticator:
    """Answers ZMQ's questions about who may come in, and tells of those who may not.

    A thread, since a handshake must not wait for an engine's step; it sleeps but for handshakes, and ends
    with the context of its socket.
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

    def _answer(self, question: list[bytes]) -> None:
        """Version, request id, domain, address, identity, mechanism, credentials."""
        known = question[5:] == [b"CURVE", self._public]
        status = (b"200", b"") if known else (b"400", b"not the fleet's key")
        self._zap.send_multipart([question[0], question[1], *status, b"", b""])

    def _on_monitor_event(self, message: list[bytes]) -> None:
        """Count a stranger, and tell unless it was told lately."""
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
    """Events of a monitor that waited, as one number, among ``events``."""
    seen = 0
    while monitor.poll(0):
        seen |= parse_monitor_message(monitor.recv_multipart())["event"]
    return seen & events
