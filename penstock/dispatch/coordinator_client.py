"""An API server's connection to the coordinator: gets engines' loads and addresses, exchanges metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from penstock.dispatch.engine_client import EngineClient
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.board import BoardEntry
from penstock.metrics.snapshot import ProcessKey, Snapshot, decode_snapshot, encode_snapshot
from penstock.wire.control import Launch
from penstock.wire.coordination import (
    BUILD,
    COORDINATOR_PROTOCOL_VERSION,
    EngineAddress,
    FleetLoad,
    JoinAccepted,
    JoinRejected,
    MetricsAnswer,
    MetricsQuery,
    MetricsRequest,
    MetricsSent,
    ProcessMetrics,
    Rejoin,
    ServerJoin,
    decode_from_coordinator,
)
from penstock.wire.messages import WireError, encode
from penstock.wire.sockets import CoordinatorLink, server_identity

log = logging.getLogger(__name__)
_warn = RateLimitedLog(log, logging.ERROR)

JOIN_INTERVAL_S = 1.0
"""Interval of repeated joins, which a restarted coordinator needs, and of this process's metrics. Also covers
missed edges of the link's edge-triggered descriptor."""
SHARE_TIMEOUT_S, SHARE_ATTEMPT_S = 2.0, 0.2
"""How long metrics that are to be shown wait for the coordinator, which may be about to restart; and for one
of its answers."""
REFRESH_TIMEOUT_S = 0.5
"""How long to wait for the coordinator and the other API servers' metrics; it waits 0.2 s for them."""
FULL_DELAY_S = 0.005
"""Delay before a message is sent for which the link had no room."""


class CoordinatorClient:
    """Lives as long as the API server; the coordinator may restart meanwhile.

    Metrics of other processes go to ``engine_client.board``.
    """

    def __init__(self, launch: Launch, engine_client: EngineClient) -> None:
        """``launch``: this API server's, in a fleet with a coordinator."""
        assert launch.coordinator is not None
        index, epoch, incarnation = launch.index, launch.epoch, launch.incarnation
        self._loop = asyncio.get_running_loop()
        self._link = CoordinatorLink(
            launch.coordinator, server_identity(index, epoch, incarnation), launch.key
        )
        build = launch.traits.get(BUILD, "")
        self._join = encode(ServerJoin(COORDINATOR_PROTOCOL_VERSION, index, epoch, incarnation, build))
        self._engine_client = engine_client
        self._snapshot: Callable[[], Snapshot] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rejected = False
        self._sent_final: set[ProcessKey] = set()
        """Ended engines whose final metrics were sent."""
        self._shared: dict[ProcessKey, int] = {}
        """Sequence numbers of the board's entries that the coordinator was sent to show."""
        self._joins = 0
        """How often the coordinator, or the next one, has accepted this process."""
        self._queries: dict[int, asyncio.Future[None]] = {}
        self._query = 0
        """Number of the last query."""
        self._to_repeat: deque[BoardEntry] = deque()
        """Entries of the board that a new coordinator is sent, as its queue takes them."""
        self._confirming: set[asyncio.Task[None]] = set()
        """Tasks that wait for engines before they send metrics."""
        self._loop.add_reader(self._link.fd, self._receive)
        self._tick()

    def start_reporting(self, snapshot: Callable[[], Snapshot]) -> None:
        """Send this process's metrics from here on; ``snapshot`` returns them."""
        self._snapshot = snapshot

    async def refresh_metrics(self, own: Snapshot) -> None:
        """Has the board take the other API servers' metrics of this moment; ``own``: this one's. One that
        does not answer keeps nobody waiting for long."""
        if not self._rejected:
            self._send_metrics(own)
            await self._query_metrics(REFRESH_TIMEOUT_S, fresh=True)

    async def share_metrics(self, own: Snapshot) -> None:
        """To be called before metrics are shown: sends ``own`` and what else the coordinator may lack of the
        board, and waits until the board has all that other API servers have shown. So counters do not fall
        from one API server's reply to another one's. Gives up while the coordinator is away."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHARE_TIMEOUT_S):
                while not self._rejected and not await self._share(own):
                    pass

    async def _share(self, own: Snapshot) -> bool:
        """Whether the coordinator that has received all has answered."""
        joins = self._joins
        for posted in [*self._engine_client.board, BoardEntry(own.key, own.sequence, encode_snapshot(own))]:
            if self._shared.get(posted.key, -1) < posted.sequence:
                while not self._send(posted):  # noqa: ASYNC110 - ZMQ has no event for it
                    await asyncio.sleep(FULL_DELAY_S)
                self._shared[posted.key] = posted.sequence
        if not await self._query_metrics(SHARE_ATTEMPT_S, fresh=False):
            self._shared.clear()  # it may not have received anything
            return False
        return joins == self._joins

    async def _query_metrics(self, timeout_s: float, *, fresh: bool) -> bool:
        """Whether the coordinator has answered in time."""
        self._query = number = self._query + 1
        answer = self._queries[number] = self._loop.create_future()
        try:
            self._link.send(encode(MetricsQuery(number, fresh)))
            self._receive()  # sending may consume the descriptor's edge
            async with asyncio.timeout(timeout_s):
                await answer
        except TimeoutError:
            return False
        finally:
            del self._queries[number]
        return True

    def close(self) -> None:
        """Send the final metrics and disconnect."""
        if self._snapshot is not None:
            self._send_metrics(self._snapshot())
        for task in self._confirming:
            task.cancel()
        self._loop.remove_reader(self._link.fd)
        if self._timer is not None:
            self._timer.cancel()
        self._link.close()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(JOIN_INTERVAL_S, self._tick)
        self._receive()
        if not self._rejected:
            self._link.reconnect_if_silent(time.monotonic())
            self._link.send(self._join)
            if self._snapshot is not None:
                self._send_metrics(self._snapshot())
            self._send_final_metrics()
            self._repeat()
        self._receive()

    def _send_final_metrics(self) -> None:
        board, ended = self._engine_client.board, self._engine_client.ended_engines()
        self._sent_final &= set(ended)
        for key in ended:
            if key not in self._sent_final and self._send(board.find_entry(key)):
                self._sent_final.add(key)

    def _repeat(self) -> None:
        while self._to_repeat and self._send(self._to_repeat[0]):
            self._to_repeat.popleft()

    def _send(self, posted: BoardEntry) -> bool:
        return self._link.send(encode(posted.message()))

    def _send_metrics(self, snapshot: Snapshot) -> bool:
        return self._send(BoardEntry(snapshot.key, snapshot.sequence, encode_snapshot(snapshot)))

    def _on_metrics_request(self, request: MetricsRequest) -> None:
        if self._engine_client.has_unconfirmed_aborts:
            later = asyncio.ensure_future(self._send_requested_later(request))
            self._confirming.add(later)
            later.add_done_callback(self._confirming.discard)
        else:
            self._send_requested(request)

    async def _send_requested_later(self, request: MetricsRequest) -> None:
        await self._engine_client.confirm_aborts()
        self._send_requested(request)
        self._receive()  # sending may consume the descriptor's edge

    def _send_requested(self, request: MetricsRequest) -> None:
        if self._snapshot is None or self._send_metrics(self._snapshot()):
            self._link.send(encode(MetricsSent(request.number)))

    def _receive(self) -> None:
        while (part := self._link.receive()) is not None:
            try:
                self._on_message(part)
            except (WireError, ValueError) as error:
                _warn("coordinator", "coordinator: %.300s", error)

    def _on_message(self, part: bytes) -> None:
        message = decode_from_coordinator(part)
        match message:
            case EngineAddress():
                self._engine_client.on_engine_address(message)
            case FleetLoad():
                for load in message.engines:
                    self._engine_client.on_load(load)
            case ProcessMetrics():
                self._engine_client.board.add_or_log(decode_snapshot(message.snapshot), message.snapshot)
            case MetricsAnswer():
                if message.number in self._queries and not self._queries[message.number].done():
                    self._queries[message.number].set_result(None)
            case MetricsRequest():
                self._on_metrics_request(message)
            case JoinAccepted():
                self._joins += 1
                self._shared.clear()
                self._to_repeat = deque(self._engine_client.board)
                self._repeat()
            case Rejoin():
                self._link.send(self._join)
            case JoinRejected():
                log.error("the coordinator refuses this API server: %s", message.reason)
                self._rejected = True
