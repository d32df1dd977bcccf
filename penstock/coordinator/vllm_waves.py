"""Coordinates waves of vLLM's engines that step together: those of a mixture-of-experts model.

In a wave all engines step until none has requests; those without run dummy batches. An engine that is given
a request between two waves reports the next wave's start, which is told to the others. Adapters send their
requests with the wave -1, so that an engine reports it always. Sources: ``vllm/v1/engine/coordinator.py``
and ``core.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import zmq

from penstock.logging_setup import RateLimitedLog
from penstock.wire.sockets import Wakeup, bound_port, tcp_address
from penstock.wire.vllm.messages import START_DP_WAVE, Outputs, encode

log = logging.getLogger(__name__)

SUBSCRIBED, UNSUBSCRIBED = b"\x01", b"\x00"
READY = b"READY"
"""Sent when all engines have subscribed: each waits for it."""
MAX_REPORT_BYTES = 1 << 20
REPORTS_PER_TURN = 256


class VllmWaves:
    """The sockets to which the engines of a group subscribe and report."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, first_port: int, ranks: int
    ) -> None:
        """Bind ``first_port`` of ``host`` and the next one; 0: free ones. Raises zmq.ZMQError."""
        self._ranks = ranks
        self._subscribed = 0
        self._wave = 0
        self._running = False
        self._warn = RateLimitedLog(log, logging.ERROR)
        self._decoder = msgspec.msgpack.Decoder(Outputs)
        self._published = context.socket(zmq.XPUB)
        self._reports = context.socket(zmq.PULL)
        try:
            self._published.setsockopt(zmq.XPUB_VERBOSER, 1)  # every engine's subscription is told
            for place, socket in enumerate((self._published, self._reports)):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPORT_BYTES)
                socket.setsockopt(zmq.IPV6, int(":" in host))
                socket.bind(tcp_address(host, first_port + place if first_port else "*"))
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def ports(self) -> tuple[int, int]:
        """The port of what is published, and the one of reports."""
        return bound_port(self._published), bound_port(self._reports)

    @property
    def wakeups(self) -> Sequence[Wakeup]:
        return self._published, self._reports

    def run_once(self) -> None:
        """Handle subscriptions and reports that wait."""
        while (message := _receive(self._published)) is not None:
            self._on_subscription(message)
        for _ in range(REPORTS_PER_TURN):
            if (message := _receive(self._reports)) is None:
                return
            self._on_report(message)

    def close(self) -> None:
        self._published.close()
        self._reports.close()

    def _on_subscription(self, message: bytes) -> None:
        if message == SUBSCRIBED:
            self._subscribed += 1
            if self._subscribed == self._ranks:  # a new group counts its waves anew
                self._wave, self._running = 0, False
                self._published.send(READY)
        elif message == UNSUBSCRIBED:
            self._subscribed = max(0, self._subscribed - 1)

    def _on_report(self, message: bytes) -> None:
        try:
            report = self._decoder.decode(message)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            self._warn("report", "a report about waves cannot be understood: %s", error)
            return
        ended, started = report.wave_complete, report.start_wave
        if ended is not None and ended >= self._wave:
            self._wave, self._running = ended + 1, False
        elif started is not None and (started > self._wave or (started == self._wave and not self._running)):
            self._wave, self._running = started, True
            self._published.send_multipart([START_DP_WAVE, encode((started, report.engine_index))])


def _receive(socket: zmq.Socket[bytes]) -> bytes | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)[0]
    except zmq.Again:
        return None
