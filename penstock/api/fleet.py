"""An API server's view of its engines: connections, submissions, and the pump of token frames."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import zmq

from ..metrics.snapshot import (
    Snapshot,
    decode_snapshot,
    merge_views,
    process_name,
    role_of,
    view_of,
)
from ..streaming.stream import Stream, StreamError
from ..streaming.table import NO_ENGINE, StreamTable
from ..wire.coordination import EngineLoad
from ..wire.frames import TokenFrame, decode_frame
from ..wire.messages import (
    OVERLOADED,
    PROTOCOL_VERSION,
    Abort,
    Bye,
    Call,
    CallReply,
    EngineInfo,
    EngineMetrics,
    Failed,
    FrameHeader,
    Goodbye,
    Hello,
    Submit,
    Welcome,
    WireError,
    decode_from_engine,
    encode,
)
from ..wire.regroup import merge
from ..wire.sockets import EngineLink, engine_address, server_identity
from .balance import Balancer, affinity_keys
from .calls import Calls
from .resumption import Resumption

log = logging.getLogger(__name__)

SAFETY_INTERVAL_S = 0.02
"""ZMQ's descriptor is edge-triggered; this timer finds what a lost edge would leave lying."""
PUMP_INTERVAL_S = 0.003
"""How long a burst of requests may keep the loop from the frames that wait."""
SUBMITS_PER_MESSAGE = 16
RECONNECT_S = 0.2

_STATUS = {"invalid_request": 400, OVERLOADED: 429, "engine_error": 500}


class EngineState:
    """One engine as seen from here. Lives as long as the API server; links come and go."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.link: EngineLink | None = None
        self.info: EngineInfo | None = None
        self.outbox: list[bytes] = []
        self.epoch = 0
        """How often it was restarted; known while ``info`` is."""
        self.draining = False
        """It finishes what it runs, and gets no new streams."""
        self.clear()

    def clear(self) -> None:
        """Nothing is known of its load: the connection is new."""
        self.submitted = 0
        """Streams submitted on this connection."""
        # -- from the latest frame or report
        self.accepted = 0
        """Of those submitted, how many are in the figures below."""
        self.waiting = 0
        self.running = 0
        self.kv_used_permille = 0
        self._step = 0

    def loaded(self, step: int, waiting: int, running: int, kv_used_permille: int, accepted: int) -> None:
        """What a frame or a report says; older ones than the latest are passed over."""
        if step >= self._step:
            self._step = step
            self.waiting, self.running, self.kv_used_permille = waiting, running, kv_used_permille
            self.accepted = accepted

    @property
    def load(self) -> int:
        """Streams it has, from all API servers, with those of ours that it has not counted yet."""
        return self.waiting + self.running + max(0, self.submitted - self.accepted)

    @property
    def up(self) -> bool:
        return self.link is not None and self.info is not None

    @property
    def takes_streams(self) -> bool:
        return self.up and not self.draining


class Wish(NamedTuple):
    """What a client says about the engine for its request."""

    session: str | None = None
    """Requests of one session go to one engine, as long as that is not overloaded."""
    rank: int | None = None
    """This engine and no other."""


NO_WISH = Wish()


class Fleet:
    """Connects to every engine, submits streams to the least loaded one, delivers their rows.

    Synchronous throughout: called from the event loop's reader callbacks and from request handlers,
    never awaiting. ``on_up`` runs when an engine is ready to take streams.
    """

    def __init__(
        self,
        run_dir: str,
        ranks: int,
        server: int,
        epoch: int,
        on_up: Callable[[EngineInfo], None],
        *,
        lockstep: bool = False,
    ) -> None:
        """``lockstep``: engines stand and fall together."""
        self.engines = [EngineState(rank) for rank in range(ranks)]
        self.streams: StreamTable | None = None
        """Set by :meth:`open`."""
        self.calls = Calls(self._send_call)
        self.snapshots: dict[tuple[str, int], Snapshot] = {}
        """The latest metrics of every engine and epoch."""
        self.frames_received = 0
        self.frames_merged = 0
        self._balancer = Balancer(ranks, first=server)
        self._resumption: Resumption | None = None
        self._run_dir = run_dir
        self._server = server
        self._epoch = epoch
        self._identity = server_identity(server, epoch)
        self._on_up = on_up
        self._lockstep = lockstep
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, max(1023, 4 * ranks + 16))
        self._loop = asyncio.get_running_loop()
        self._last_pump = 0.0
        self._flush_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def open(self, streams: StreamTable, resume_timeout_s: float, outcomes: Counter[str]) -> None:
        """Before any submit, once the first engine's vocabulary is known. For ``resume_timeout_s`` and
        ``outcomes`` see :class:`Resumption`."""
        self.streams = streams
        self._resumption = Resumption(streams, resume_timeout_s, self._give, outcomes)

    # -- connections

    def connect(self) -> None:
        for engine in self.engines:
            self._connect(engine)
        self._tick()

    def _connect(self, engine: EngineState) -> None:
        if self._closed:
            return
        link = EngineLink(self._context, engine_address(self._run_dir, engine.rank), self._identity)
        engine.link = link
        link.send([encode(Hello(PROTOCOL_VERSION, self._server, self._epoch))])
        self._loop.add_reader(link.fd, self._receive, engine)
        self._loop.add_reader(link.monitor_fd, self._check, engine)

    def _check(self, engine: EngineState) -> None:
        if engine.link is not None and engine.link.lost():
            self._receive(engine)  # what it sent before it went
            self._gone(engine, "The engine that ran this request is gone.")

    def _gone(self, engine: EngineState, message: str) -> None:
        """The engine has ended, and with it those that run in lock-step with it."""
        ended = self.engines if self._lockstep else [engine]
        for other in ended:
            other.info = None  # none of them takes a stream of another one
        for other in ended:
            self._disconnect(other, message)

    def _disconnect(self, engine: EngineState, message: str) -> None:
        link = engine.link
        if link is None:
            return
        engine.link, engine.info = None, None
        engine.outbox.clear()
        engine.clear()
        self.calls.gone(engine.rank)
        self._loop.remove_reader(link.fd)
        self._loop.remove_reader(link.monitor_fd)
        link.close()
        if self._resumption is not None:
            self._resumption.on_lost(engine.rank, message, time.monotonic())
        if not self._closed:
            self._loop.call_later(RECONNECT_S, self._connect, engine)

    def _tick(self) -> None:
        """The safety timer."""
        self.pump()
        for engine in self.engines:
            self._check(engine)
        if self._resumption is not None:
            self._resumption.tick(time.monotonic())
        if not self._closed:
            self._timer = self._loop.call_later(SAFETY_INTERVAL_S, self._tick)

    def close(self, message: str) -> None:
        """End every stream with an error and leave the engines."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._resumption is not None:
            self._resumption.close(message)
        for engine in self.engines:
            if engine.link is not None:
                engine.link.send([encode(Bye())])
                self._disconnect(engine, message)
        self._context.destroy(linger=100)

    # -- streams out

    def any_up(self) -> bool:
        return any(engine.up for engine in self.engines)

    def takes_streams(self) -> bool:
        return any(engine.takes_streams for engine in self.engines)

    def set_draining(self, ranks: list[int]) -> None:
        """These engines, and no others, get no new streams."""
        for engine in self.engines:
            engine.draining = engine.rank in ranks
        if self._resumption is not None and self.takes_streams():
            self._resumption.on_engine()

    def pick(
        self, wish: Wish = NO_WISH, prompt: bytes = b"", cache_salt: str | None = None
    ) -> EngineState | None:
        """The engine for a stream with this prompt, int32 token ids; None when none takes streams, or not the
        one that is wished for."""
        if wish.rank is not None:
            wished = self.engines[wish.rank]
            return wished if wished.takes_streams else None
        loads = [engine.load if engine.takes_streams else None for engine in self.engines]
        keys = affinity_keys(prompt, cache_salt, wish.session) if len(loads) > 1 else ()
        rank = self._balancer.choose(loads, keys)
        return None if rank is None else self.engines[rank]

    def submit(self, stream: Stream, request: Submit) -> None:
        """Have the stream's engine start it, and remember what was asked for."""
        stream.request = request
        self._submit(self.engines[stream.rank], request)

    def _give(self, stream: Stream, request: Submit) -> bool:
        """Have any engine go on with a stream that lost its own; False when there is none."""
        engine = self.pick()
        if engine is None or self.streams is None:
            return False
        stream.refusals = 0
        self.streams.adopt(stream, engine.rank)
        self._submit(engine, request)
        return True

    def _submit(self, engine: EngineState, request: Submit) -> None:
        engine.submitted += 1
        engine.outbox.append(encode(request))
        if len(engine.outbox) >= SUBMITS_PER_MESSAGE:
            self._flush(engine)
        else:
            self._schedule_flush()

    def abort(self, stream: Stream, *, stopped: bool = False) -> None:
        """Tell the stream's engine to stop it; its handle is free once the engine has confirmed.

        ``stopped``: it ends well, as its text has reached a stop string.
        """
        if stream.rank == NO_ENGINE:
            assert self.streams is not None  # it was opened there
            self.streams.close(stream)
            return
        engine = self.engines[stream.rank]
        if engine.link is not None:
            engine.outbox.append(encode(Abort([stream.handle], stopped)))
            self._schedule_flush()

    def _send_call(self, rank: int, call: Call) -> bool:
        engine = self.engines[rank]
        if not engine.up:
            return False
        engine.outbox.append(encode(call))
        self._schedule_flush()
        return True

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_all)

    def _flush_all(self) -> None:
        self._flush_scheduled = False
        for engine in self.engines:
            if engine.outbox:
                self._flush(engine)
                self._receive(engine)  # a send may swallow the descriptor's edge

    def _flush(self, engine: EngineState) -> None:
        parts, engine.outbox = engine.outbox, []
        if engine.link is not None:
            engine.link.send(parts)

    # -- rows in

    def breathe(self) -> None:
        """Called within bursts of other work: delivers what waits, at most every PUMP_INTERVAL_S."""
        if time.monotonic() - self._last_pump > PUMP_INTERVAL_S:
            self.pump()

    def pump(self) -> None:
        for engine in self.engines:
            if engine.outbox:
                self._flush(engine)
            self._receive(engine)

    def _receive(self, engine: EngineState) -> None:
        """Take all messages that wait; frames among them are merged into one pass over the streams."""
        now = self._last_pump = time.monotonic()
        link = engine.link
        frames: list[TokenFrame] = []
        try:
            while link is not None and (parts := link.receive()) is not None:
                message = decode_from_engine(parts[0])
                if isinstance(message, FrameHeader):
                    if len(parts) != 2:
                        raise WireError(f"a token frame has 2 parts, not {len(parts)}")
                    frames.append(decode_frame(message, parts[1]))
                else:
                    self._deliver(engine, frames, now)
                    frames = []
                    self._on_message(engine, message)
                    link = engine.link
            self._deliver(engine, frames, now)
        except WireError as error:
            log.error("engine %d: %s", engine.rank, error)
            self._disconnect(engine, "The engine that ran this request sent what cannot be understood.")

    def _deliver(self, engine: EngineState, frames: list[TokenFrame], now: float) -> None:
        if not frames:
            return
        if self.streams is None:
            raise WireError("a token frame before any stream")
        self.frames_received += len(frames)
        self.frames_merged += len(frames) - 1
        frame = merge(frames)
        engine.loaded(frame.step, frame.waiting, frame.running, frame.kv_used_permille, frame.accepted)
        self.streams.deliver(engine.rank, frame, now)

    def _on_message(self, engine: EngineState, message: object) -> None:
        match message:
            case Welcome():
                if message.protocol != PROTOCOL_VERSION or message.rank != engine.rank:
                    raise WireError(
                        f"expected rank {engine.rank} with protocol {PROTOCOL_VERSION}, "
                        f"got rank {message.rank} with protocol {message.protocol}"
                    )
                engine.info, engine.epoch = message.info, message.epoch
                self._on_up(message.info)
                whole = not self._lockstep or all(other.up for other in self.engines)
                if self._resumption is not None and whole and self.takes_streams():
                    self._resumption.on_engine()
            case Failed():
                self._on_failed(engine, message)
            case EngineMetrics():
                self._on_metrics(engine, message)
            case CallReply():
                self.calls.replied(engine.rank, message)
            case Goodbye():
                self._gone(engine, f"The engine that ran this request ended: {message.reason}")
            case _:
                raise WireError(f"unexpected {type(message).__name__}")

    def _on_failed(self, engine: EngineState, failed: Failed) -> None:
        if self.streams is None:
            raise WireError("a failed stream before any stream")
        stream = self.streams.run_by(engine.rank, failed.stream)
        if failed.code == OVERLOADED and failed.position == 0 and self._ask_next(stream):
            return
        status = _STATUS.get(failed.code, 500)
        error = StreamError(status, failed.code, failed.message, failed.retry_after_ms)
        self.streams.fail(engine.rank, failed.stream, error)

    def _ask_next(self, stream: Stream) -> bool:
        """Have another engine take a stream that one had no room for: the queue is full when none has any.

        False when each has been asked, or nobody waits for the stream any longer.
        """
        assert self.streams is not None
        assert stream.request is not None  # it was submitted
        stream.refusals += 1
        takers = [engine for engine in self.engines if engine.takes_streams]
        if stream.refusals >= len(takers) or not self.streams.wanted(stream):
            return False
        following = next((engine for engine in takers if engine.rank > stream.rank), takers[0])
        self.streams.adopt(stream, following.rank)
        self._submit(following, stream.request)
        return True

    def _on_metrics(self, engine: EngineState, message: EngineMetrics) -> None:
        engine.waiting, engine.running = message.waiting, message.running
        engine.kv_used_permille = message.kv_used_permille
        try:
            snapshot = decode_snapshot(message.snapshot)
        except ValueError as error:
            raise WireError(str(error)) from None
        self.snapshots = merge_views(self.snapshots, view_of(snapshot))

    def ended_snapshots(self) -> list[Snapshot]:
        """The last ones of engines that are gone."""
        alive = {(process_name("engine", engine.rank), engine.epoch) for engine in self.engines if engine.up}
        return [
            snapshot
            for key, snapshot in self.snapshots.items()
            if key not in alive and role_of(snapshot.process) == "engine"
        ]

    def on_load(self, load: EngineLoad) -> None:
        """The coordinator's news of one engine."""
        engine = self.engines[load.rank] if load.rank < len(self.engines) else None
        if engine is not None and engine.up and engine.epoch == load.epoch:
            engine.loaded(load.step, load.waiting, load.running, load.kv_used_permille, load.accepted)
