"""The handshake with an engine that was started here: tells it where to connect, and which rank it is.

    engine                                 this process
      HELLO  ─────────────────────────────►
             ◄─────────────────────────────  addresses of its requests and outputs, and its rank
      … loads its model, connects there, and describes itself
      READY  ─────────────────────────────►

vLLM takes an address of TCP for it, so that it is a port of the loopback interface; what the engine is told
are sockets in the run directory, which other users cannot reach.
"""

from __future__ import annotations

import logging

import msgspec
import zmq

from penstock.wire.sockets import HANDSHAKE_MS, bound_port, tcp_address
from penstock.wire.vllm.messages import HandshakeMessage, HandshakeReply, encode

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
IDENTITY = (0).to_bytes(2, "little")
"""The identity of an engine that is the only one to vLLM."""
MAX_MESSAGE_BYTES = 1 << 16


class LaunchHandshake:
    """The socket to which the engine connects first. Used by one thread."""

    def __init__(self, reply: HandshakeReply) -> None:
        """Bind a free port. ``reply``: the answer to HELLO. Raises zmq.ZMQError."""
        self._reply = encode(reply)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.bind(tcp_address(HOST, "*"))
        self.has_loaded = False
        """Whether the engine has said READY."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return HOST, bound_port(self._socket)

    def answer(self) -> None:
        """Answer what was received; what is not the engine's is ignored."""
        while self._socket.poll(0):
            frames = self._socket.recv_multipart()
            if len(frames) != 2 or frames[0] != IDENTITY:
                log.warning("a connection to the handshake of vLLM's engine is no engine's: it is ignored")
                continue
            try:
                message = msgspec.msgpack.decode(frames[1], type=HandshakeMessage)
            except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
                log.warning("a message at the handshake of vLLM's engine cannot be read: %s", error)
                continue
            if message.status == "HELLO":
                self._socket.send_multipart([IDENTITY, self._reply])
            elif message.status == "READY":
                self.has_loaded = True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()
