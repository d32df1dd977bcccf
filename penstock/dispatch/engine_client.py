"""An API server's view of its engines: which one a stream goes to, and what comes of it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.dispatch.connections import Connections, EngineState
from penstock.dispatch.engine_rpc import Calls
from penstock.dispatch.load_balancer import LoadBalancer, affinity_keys
from penstock.dispatch.resumption import Resumption
from penstock.metrics.snapshot import (
    ProcessKey,
    Snapshot,
    decode_snapshot,
    merge_views,
    process_name,
    role_of,
    view_of,
)
from penstock.streaming.output_processor import NO_ENGINE, OutputProcessor
from penstock.streaming.stream import Stream, StreamError
from penstock.wire.coordination import EngineAddress, EngineLoad
from penstock.wire.curve import ClusterKey
from penstock.wire.frames import TokenFrame
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    OVERLOADED,
    SLEEPING,
    Abort,
    Draining,
    EngineInfo,
    EngineMetrics,
    FromEngine,
    GoAway,
    Hello,
    RpcCall,
    RpcReply,
    StreamFailed,
    Submit,
    Welcome,
    WireError,
    encode,
)
from penstock.wire.regroup import merge_frames

log = logging.getLogger(__name__)

SUBMITS_PER_MESSAGE = 16

_STATUS = {"invalid_request": 400, OVERLOADED: 429, SLEEPING: 503, "engine_error": 500}


class RoutingHints(NamedTuple):
    """What a client says about the engine for its request."""

    session: str | None = None
    """Requests of one session go to one engine, as long as that is not overloaded."""
    rank: int | None = None
    """This engine and no other."""


NO_HINTS = RoutingHints()


class EngineClient:
    """Submits streams to the least loaded engine, or the one that is wished for, and delivers their rows.

    Synchronous as its :class:`Connections`. ``on_up`` runs when an engine is ready to take streams.
    """

    def __init__(
        self,
        ranks: int,
        places: Mapping[int, str],
        server: Hello,
        on_up: Callable[[EngineInfo], None],
        key: ClusterKey | None = None,
        *,
        lockstep: bool = False,
        servers: int = 1,
    ) -> None:
        """See :class:`Connections`. ``lockstep``: engines stand and fall together."""
        self._connections = Connections(ranks, places, server, key, self, servers)
        self.engines = self._connections.engines
        self.streams: OutputProcessor | None = None
        """Set by :meth:`open`."""
        self.calls = Calls(self._send_call)
        self.snapshots: dict[ProcessKey, Snapshot] = {}
        """The latest metrics of every other process and start of it."""
        self.frames_received = 0
        self.frames_merged = 0
        self._load_balancer = LoadBalancer(ranks, first=server.server)
        self._resumption: Resumption | None = None
        self._on_up = on_up
        self._lockstep = lockstep

    def open(self, streams: OutputProcessor, resume_timeout_s: float, outcomes: Counter[str]) -> None:
        """Before any submit, once the first engine's vocabulary is known. For ``resume_timeout_s`` and
        ``outcomes`` see :class:`Resumption`."""
        self.streams = streams
        self._resumption = Resumption(streams, resume_timeout_s, self._give, outcomes)

    def connect(self) -> None:
        self._connections.open()

    def place(self, place: EngineAddress) -> None:
        """The coordinator's news of where an engine of another host is."""
        if place.rank < len(self.engines):
            self._connections.place(place.rank, place.address or None)

    def on_gone(self, engine: EngineState, reason: str) -> None:
        """The engine has ended, and with it those that run in lock-step with it."""
        ended = self.engines if self._lockstep else [engine]
        for other in ended:
            other.info = None  # none of them takes a stream of another one
        for other in ended:
            self._connections.disconnect(other, reason)

    def on_lost(self, engine: EngineState, reason: str) -> None:
        self.calls.gone(engine.rank)
        if self._resumption is not None:
            self._resumption.on_lost(engine.rank, reason, time.monotonic())

    def on_tick(self, now: float) -> None:
        if self._resumption is not None:
            self._resumption.tick(now)

    def close(self, message: str) -> None:
        """End every stream with an error and leave the engines."""
        self._connections.stop()
        if self._resumption is not None:
            self._resumption.close(message)
        self._connections.close(message)

    def members(self) -> list[int]:
        """Ranks of the engines that there are; those of other hosts come and go."""
        return [engine.rank for engine in self.engines if engine.up or engine.address is not None]

    # -- streams out

    def any_up(self) -> bool:
        return any(engine.up for engine in self.engines)

    def accepts_streams(self) -> bool:
        return any(engine.accepts_streams for engine in self.engines)

    def sleeps(self) -> bool:
        """Whether no engine takes streams because they sleep, or have yet to wake."""
        resting = any(engine.asleep or (engine.up and not engine.up_to_date) for engine in self.engines)
        return resting and not self.accepts_streams()

    def set_draining(self, ranks: list[int]) -> None:
        """These engines, and no others, get no new streams."""
        for engine in self.engines:
            engine.draining = engine.rank in ranks
        self.on_engine_available()

    def on_engine_available(self) -> None:
        """There may be engines that take streams again: those that wait for one go on."""
        whole = not self._lockstep or all(engine.up for engine in self.engines)
        if self._resumption is not None and whole and self.accepts_streams():
            self._resumption.on_engine()

    def pick(
        self, hints: RoutingHints = NO_HINTS, prompt: bytes = b"", cache_salt: str | None = None
    ) -> EngineState | None:
        """The engine for a stream with this prompt, int32 token ids; None when none takes streams, or not the
        one that is wished for."""
        rank: int | None = 0 if len(self.engines) == 1 else hints.rank
        if rank is not None:
            engine = self.engines[rank]
            return engine if engine.accepts_streams else None
        candidates = [engine for engine in self.engines if engine.accepts_streams]
        if len(candidates) > 1:
            now = time.monotonic()
            candidates = [engine for engine in candidates if not engine.silent(now)] or candidates
        loads: list[int | None] = [None] * len(self.engines)
        for engine in candidates:
            loads[engine.rank] = engine.load
        rank = self._load_balancer.choose(loads, affinity_keys(prompt, cache_salt, hints.session))
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
        self.streams.assign(stream, engine.rank)
        self._submit(engine, request)
        return True

    def _submit(self, engine: EngineState, request: Submit) -> None:
        engine.on_submit(time.monotonic())
        self._connections.send(engine, encode(request), SUBMITS_PER_MESSAGE)

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
            self._connections.send(engine, encode(Abort([stream.handle], stopped)))

    def _send_call(self, rank: int, call: RpcCall) -> None:
        self._connections.send(self.engines[rank], encode(call))

    # -- what engines say

    def yield_to_pump(self) -> None:
        """Called within bursts of other work, so that it delays no rows."""
        self._connections.yield_to_pump()

    def on_frames(self, engine: EngineState, frames: list[TokenFrame], now: float) -> None:
        """Hand the rows of frames to their streams in one pass."""
        if self.streams is None:
            raise WireError("a token frame before any stream")
        self.frames_received += len(frames)
        self.frames_merged += len(frames) - 1
        frame = merge_frames(frames)
        engine.update_load(
            frame.step, frame.waiting, frame.running, frame.kv_used_permille, frame.accepted, now
        )
        self.streams.process_frame(engine.rank, frame, now)

    def on_message(self, engine: EngineState, message: FromEngine) -> None:
        match message:
            case Welcome():
                if message.protocol != ENGINE_PROTOCOL_VERSION or message.rank != engine.rank:
                    raise WireError(
                        f"expected rank {engine.rank} with protocol {ENGINE_PROTOCOL_VERSION}, "
                        f"got rank {message.rank} with protocol {message.protocol}"
                    )
                engine.info = message.info
                engine.epoch, engine.incarnation = message.epoch, message.incarnation
                self._on_up(message.info)
                self.calls.connected(engine.rank, engine.epoch, engine.incarnation)
                self.on_engine_available()
            case StreamFailed():
                self._on_failed(engine, message)
            case EngineMetrics():
                self._on_metrics(engine, message)
            case RpcReply():
                self.calls.replied(engine.rank, message)
            case Draining():
                engine.leaving = True
            case GoAway():
                self.on_gone(engine, f"The engine that ran this request ended: {message.reason}")
            case _:
                raise WireError(f"unexpected {type(message).__name__}")

    def _on_failed(self, engine: EngineState, failed: StreamFailed) -> None:
        if self.streams is None:
            raise WireError("a failed stream before any stream")
        stream = self.streams.running_stream(engine.rank, failed.stream)
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
        candidates = [engine for engine in self.engines if engine.accepts_streams]
        if stream.refusals >= len(candidates) or not self.streams.is_wanted(stream):
            return False
        following = next((engine for engine in candidates if engine.rank > stream.rank), candidates[0])
        self.streams.assign(stream, following.rank)
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
        alive = {
            (process_name("engine", engine.rank), engine.incarnation, engine.epoch)
            for engine in self.engines
            if engine.up
        }
        return [
            snapshot
            for key, snapshot in self.snapshots.items()
            if key not in alive and role_of(snapshot.process) == "engine"
        ]

    def on_load(self, load: EngineLoad) -> None:
        """The coordinator's news of one engine."""
        engine = self.engines[load.rank] if load.rank < len(self.engines) else None
        if engine is None or not engine.up:
            return
        if (engine.incarnation, engine.epoch) == (load.incarnation, load.epoch):
            now = time.monotonic()
            engine.update_load(
                load.step, load.waiting, load.running, load.kv_used_permille, load.accepted, now
            )
