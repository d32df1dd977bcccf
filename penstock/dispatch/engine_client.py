"""Chooses an engine for each stream, submits the stream, and delivers its rows and failures."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from penstock.dispatch.adapter_registry import AdapterRegistry
from penstock.dispatch.connections import Connections, EngineState
from penstock.dispatch.desired_states import EngineStates
from penstock.dispatch.engine_rpc import Calls
from penstock.dispatch.load_balancer import LoadBalancer
from penstock.dispatch.metrics_queries import MetricsQueries
from penstock.dispatch.page_sender import PageSender
from penstock.dispatch.periodic_timer import PeriodicTimer
from penstock.dispatch.resumption import Resumption
from penstock.dispatch.sent_prompts import KnownPrefix
from penstock.metrics.board import MetricsBoard
from penstock.metrics.snapshot import ProcessKey, decode_snapshot, process_name, role_of
from penstock.streaming.engine_faults import INVALID_CODE, INVALID_METRICS, UNREADABLE, EngineFaults
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.request_states import StreamState
from penstock.streaming.stream import Stream, StreamError
from penstock.streaming.stream_columns import NO_ENGINE
from penstock.wire.coordination import EngineAddress, EngineLoad
from penstock.wire.curve import ClusterKey
from penstock.wire.frames import TokenFrame
from penstock.wire.media.items import PagesWanted
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    MEDIA_GONE,
    NO_ADAPTER,
    OVERLOADED,
    PAUSED,
    PROMPT_GONE,
    SLEEPING,
    UNAVAILABLE,
    WEIGHTS,
    Abort,
    AdapterKey,
    Admitted,
    ApplyStates,
    Draining,
    EngineInfo,
    EngineMetrics,
    EngineMetricsQuery,
    FromEngine,
    GoAway,
    Hello,
    RoutedExperts,
    RpcCall,
    RpcReply,
    Started,
    StatesObserved,
    StreamFailed,
    Submit,
    Welcome,
    WireError,
    encode,
)
from penstock.wire.regroup import merge_frames

log = logging.getLogger(__name__)

MAX_MESSAGE_LENGTH = 4096
"""Characters of an engine's error messages that clients get."""
MAX_RETRY_AFTER_MS = 60_000
"""Maximum time that clients are told to wait; engines estimate at most that."""
RESUMPTION_INTERVAL_S = 0.025
"""Interval of the timer that runs while streams wait for an engine."""

_FIELD = re.compile(r"([a-z_]+): ")
"""How an engine's message starts that is about one field."""
_STATUS = {
    "invalid_request": 400,
    NO_ADAPTER: 404,
    OVERLOADED: 429,
    UNAVAILABLE: 503,
    SLEEPING: 503,
    PAUSED: 503,
    PROMPT_GONE: 500,
    MEDIA_GONE: 503,
    "engine_error": 500,
}
"""HTTP status by the code of an engine's failure; clients get no other code."""


class RoutingHints(NamedTuple):
    """A client's preferences for the engine of its request."""

    session: str | None = None
    """Requests of one session go to the same engine unless it is overloaded."""
    rank: int | None = None
    """Use only the engine of this rank."""


NO_HINTS = RoutingHints()


class EngineClient:
    """The engines of one API server: streams go out, rows, failures, metrics and replies to calls come in.

    Synchronous like its :class:`Connections`. ``on_up`` is called when an engine has accepted a connection.
    """

    def __init__(
        self,
        ranks: int,
        addresses: Mapping[int, str],
        server: Hello,
        on_up: Callable[[EngineInfo], None],
        key: ClusterKey | None = None,
        *,
        lockstep: bool = False,
        servers: int = 1,
    ) -> None:
        """See :class:`Connections`. ``lockstep``: when one engine ends, all end."""
        self._connections = Connections(ranks, addresses, server, key, receiver=self, servers=servers)
        self.engines = self._connections.engines
        self.streams: OutputProcessor | None = None
        """Set by :meth:`open`."""
        self.pages = PageSender(self._connections)
        self.calls = Calls(self._send_call)
        self.adapters = AdapterRegistry()
        """The LoRA adapters of all engines."""
        self.states = EngineStates(self.engines, self.adapters, self._send_states, lockstep=lockstep)
        self.metrics_queries = MetricsQueries(self._send_metrics_query)
        self.board = MetricsBoard(for_totals=True)
        """The metrics of every other process."""
        self.faults = EngineFaults()
        self.frames_received = 0
        self.frames_merged = 0
        self._load_balancer = LoadBalancer(ranks, first=server.server)
        self._resumption: Resumption | None = None
        self._resumption_timer: PeriodicTimer | None = None
        self._on_up = on_up
        self.lockstep = lockstep
        """Whether all engines make the same steps."""
        self._unconfirmed_aborts: set[int] = set()
        """Engines that were sent an abort since the last query."""

    def open(self, streams: OutputProcessor, resume_timeout_s: float, outcomes: Counter[str]) -> None:
        """To be called before any submit, once the first engine's vocabulary is known. For the last two
        arguments see :class:`Resumption`."""
        self.streams = streams
        streams.set_engines(self.abort, self.faults)
        self._resumption = Resumption(streams, resume_timeout_s, self._resubmit, outcomes, self.states.closed)

    def connect(self) -> None:
        self._connections.open()

    def on_engine_address(self, message: EngineAddress) -> None:
        """The coordinator sent the address of an engine on another host."""
        if message.rank < len(self.engines):
            self._connections.set_address(message.rank, message.address or None)

    def on_gone(self, engine: EngineState, reason: str) -> None:
        """The engine has ended, and so have those in lock-step with it: disconnects them. ``reason`` as for
        :meth:`on_lost`."""
        ended = self.engines if self.lockstep else [engine]
        for other in ended:
            other.info = None  # first, so that no stream is resumed on one of them
        for other in ended:
            self._connections.disconnect(other, reason)

    def on_lost(self, engine: EngineState, reason: str, accepted: int) -> None:
        """The connection is closed. ``reason``: for clients whose request the engine ran. ``accepted``:
        number of streams that it had taken from the connection before its last step that ended."""
        self.calls.on_disconnected(engine.rank)
        self.states.on_disconnected()
        self.metrics_queries.on_disconnected(engine.rank)
        if self._resumption is not None:
            self._resumption.on_lost(engine.rank, reason, time.monotonic(), accepted)
            self._watch_resumption()

    def on_fault(self, engine: EngineState, message: str, *arguments: object, exc_info: bool = False) -> None:
        """A message of the engine could not be decoded or handled; the connection is closed."""
        self.faults.record(engine.rank, UNREADABLE, message, *arguments, exc_info=exc_info)

    def on_unsent(self, engine: EngineState, handles: list[int]) -> None:
        """The exception at hand is that a request could not be encoded: its streams end."""
        assert self.streams is not None  # they were submitted
        engine.submitted -= len(handles)
        for handle in handles:
            stream = self.streams.streams[handle]
            if stream is not None:
                self.streams.break_off(stream, ended=True)

    def _watch_resumption(self) -> None:
        """Start the timer of :meth:`resume` if streams wait for an engine."""
        waits = self._resumption is not None and self._resumption.waits
        if waits and self._resumption_timer is None:
            self._resumption_timer = PeriodicTimer(
                "resumption", RESUMPTION_INTERVAL_S, lambda: self.resume(time.monotonic())
            )

    def resume(self, now: float) -> None:
        """Resume or end streams that wait for an engine. Called every RESUMPTION_INTERVAL_S while there
        are any."""
        if self._resumption is not None:
            self._resumption.tick(now)
            if not self._resumption.waits:
                self._end_resumption_timer()

    def _end_resumption_timer(self) -> None:
        if self._resumption_timer is not None:
            self._resumption_timer.cancel()
            self._resumption_timer = None

    def close(self, message: str) -> None:
        """End every stream with an error and disconnect from the engines."""
        self._connections.stop()
        self._end_resumption_timer()
        if self._resumption is not None:
            self._resumption.close(message)
        self._connections.close(message)

    def members(self) -> list[int]:
        """Ranks of the current engines; those on other hosts may join and leave."""
        return [engine.rank for engine in self.engines if engine.up or engine.address is not None]

    # -- choosing an engine and submitting

    def accepts_streams(self, rank: int | None = None) -> bool:
        """Whether some engine accepts streams, or the one of ``rank``."""
        if rank is not None:
            return self.engines[rank].accepts_streams
        for engine in self.engines:  # noqa: SIM110 - any() over a generator takes three times as long
            if engine.accepts_streams:
                return True
        return False

    def refusal(self) -> str:
        """Why no engine accepts streams: SLEEPING, PAUSED or WEIGHTS, also of engines that have not woken up
        yet or the like; empty: for another reason, or some accept."""
        codes = {engine.closed for engine in self.engines}
        known = next((code for code in (SLEEPING, PAUSED, WEIGHTS) if code in codes), "")
        return "" if self.accepts_streams() else known

    def set_draining(self, ranks: list[int]) -> None:
        """Stop new streams to these engines, and allow them to all others."""
        for engine in self.engines:
            engine.draining = engine.rank in ranks
        self.on_engine_available()

    def on_engine_available(self) -> None:
        """Some engine may accept streams again: resumes the streams that wait for one."""
        whole = not self.lockstep or all(engine.up for engine in self.engines)
        if self._resumption is not None and whole and self.accepts_streams():
            self._resumption.on_engine()

    def full(self, hints: RoutingHints = NO_HINTS, adapter: AdapterKey | None = None) -> bool:
        """Whether a request may use engines, but all of these have too many bytes of requests queued."""
        engines = self.engines if hints.rank is None else [self.engines[hints.rank]]
        some = False
        for engine in engines:
            if engine.accepts_streams and engine.has_adapter(adapter):
                if not engine.full:
                    return False
                some = True
        return some

    def pick(
        self,
        hints: RoutingHints = NO_HINTS,
        prompt: bytes = b"",
        cache_salt: str | None = None,
        adapter: AdapterKey | None = None,
    ) -> EngineState | None:
        """Choose the engine for a stream. ``prompt``: int32 token ids. None if no engine that has the
        adapter accepts streams, or the one of ``hints.rank`` does not."""
        rank: int | None = 0 if len(self.engines) == 1 else hints.rank
        if rank is not None:
            engine = self.engines[rank]
            return engine if engine.accepts_streams and engine.has_adapter(adapter) else None
        candidates = self._candidates(adapter)
        if len(candidates) > 1:
            candidates = [engine for engine in candidates if not engine.full] or candidates
            now = time.monotonic()
            candidates = [engine for engine in candidates if not engine.is_unresponsive(now)] or candidates
        loads: list[int | None] = [None] * len(self.engines)
        for engine in candidates:
            loads[engine.rank] = engine.load
        digest = None if adapter is None else adapter[1]
        keys = self._load_balancer.keys_of(prompt, cache_salt, hints.session, digest)
        rank = self._load_balancer.choose(loads, keys)
        return None if rank is None else self.engines[rank]

    def _candidates(self, adapter: AdapterKey | None) -> list[EngineState]:
        engines = [engine for engine in self.engines if engine.accepts_streams]
        return engines if adapter is None else [engine for engine in engines if engine.has_adapter(adapter)]

    def submit(self, stream: Stream, request: Submit, known: KnownPrefix | None = None) -> None:
        """Submit the stream to the engine of its rank, and keep the request for resumption. ``known``: of its
        prompt."""
        self._connections.submit(self.engines[stream.rank], request, stream.reply, known)
        stream.request = request

    def _resubmit(self, stream: Stream, request: Submit) -> bool:
        """Submit a stream that lost its engine to another one, or to the only one that may run it; False if
        none accepts streams."""
        adapter = request.adapter_key
        if adapter is not None and not self.adapters.has(*adapter):
            adapter = None  # it has been unloaded: an engine that still has it goes on, others end the stream
        engine = self.pick(RoutingHints(rank=stream.pinned_rank), adapter=adapter)
        if engine is None or self.streams is None:
            return False
        stream.refusals = 0
        self.streams.assign(stream, engine.rank)
        self._connections.submit(engine, request, owner=stream.reply)
        stream.started, stream.submit_number = False, engine.submitted
        stream.reply.on_resumed(engine.rank, request.resumed)
        return True

    def abort(self, stream: Stream, *, stopped: bool = False) -> None:
        """Abort a stream that its request has dropped on its engine; its handle is free once the engine has
        confirmed, or now if no engine has it.

        ``stopped``: the stream is complete, as its text contains a stop string.
        """
        if stream.state is StreamState.ENDED:
            return
        if stream.rank == NO_ENGINE or stream.request is None:
            assert self.streams is not None  # it was opened there
            self.streams.close(stream)
            return
        engine = self.engines[stream.rank]
        if engine.link is not None:
            self._unconfirmed_aborts.add(engine.rank)
            self._connections.send(engine, encode(Abort([stream.handle], stopped)))

    def _send_call(self, rank: int, call: RpcCall) -> None:
        self._connections.send(self.engines[rank], encode(call))

    def _send_states(self, engine: EngineState, message: ApplyStates) -> None:
        self._connections.send(engine, encode(message))

    def _send_metrics_query(self, rank: int, number: int) -> None:
        self._connections.send(self.engines[rank], encode(EngineMetricsQuery(number)))

    async def refresh_metrics(self) -> None:
        """Has the board take the metrics of all engines as of now. An engine that does not answer keeps
        nobody waiting for long."""
        self._unconfirmed_aborts.clear()
        await self.metrics_queries.ask([engine.rank for engine in self.engines if engine.up])

    def is_up_to_date(self) -> bool:
        """Whether all connected engines have observed the desired states."""
        return all(engine.up_to_date for engine in self.engines if engine.up)

    @property
    def has_unconfirmed_aborts(self) -> bool:
        """Whether an engine may not have counted a stream that a reply has ended, as for a stop string."""
        return bool(self._unconfirmed_aborts)

    async def confirm_aborts(self) -> None:
        """Wait until engines have counted the streams that were aborted so far."""
        ranks = [rank for rank in self._unconfirmed_aborts if self.engines[rank].up]
        self._unconfirmed_aborts.clear()
        await self.metrics_queries.ask(ranks)

    # -- messages of engines

    def yield_to_pump(self) -> None:
        """Receive waiting rows. To be called within bursts of other work, which would delay them."""
        self._connections.yield_to_pump()

    def on_frames(self, engine: EngineState, frames: list[TokenFrame], now: float) -> None:
        """Deliver consecutive token frames, at least one, to their streams in one pass."""
        if self.streams is None:
            raise WireError("a token frame before any stream")
        self.frames_received += len(frames)
        self.frames_merged += len(frames) - 1
        frame = merge_frames(frames)
        if frame.weights != engine.weights:
            self._switch_weights(engine, self.streams, frame.weights)
        engine.update_load(
            step=frame.step,
            waiting=frame.waiting,
            running=frame.running,
            kv_used=frame.kv_used,
            accepted=frame.accepted,
            now=now,
        )
        self.streams.process_frame(engine.rank, frame, now)

    def _on_routes(self, engine: EngineState, message: RoutedExperts) -> None:
        if self.streams is None:
            raise WireError("the experts of a stream before any stream")
        self.streams.hand_routes(engine.rank, message)

    @staticmethod
    def _switch_weights(engine: EngineState, streams: OutputProcessor, generation: int) -> None:
        """A frame has other weights than those before, or is the first one of its connection."""
        status = engine.weights_status
        if status.generation != generation:
            raise WireError(f"a frame of weights {generation}, but it has told of {status.generation} last")
        engine.weights = generation
        streams.switch_weights(engine.rank, status.version)

    def on_message(self, engine: EngineState, message: FromEngine) -> None:
        """Handle any message but a token frame, in order with frames."""
        match message:
            case Welcome():
                if message.protocol != ENGINE_PROTOCOL_VERSION or message.rank != engine.rank:
                    raise WireError(
                        f"expected rank {engine.rank} with protocol {ENGINE_PROTOCOL_VERSION}, "
                        f"got rank {message.rank} with protocol {message.protocol}"
                    )
                if engine.info is not None:
                    raise WireError("a second Welcome on a connection")
                engine.info = message.info
                engine.epoch, engine.incarnation = message.epoch, message.incarnation
                engine.keep_prompts(message.kept_prompt_bytes)
                self._on_up(message.info)
                self.states.on_connected(engine)
                self.calls.on_connected(engine.rank, engine.epoch, engine.incarnation)
                self.on_engine_available()
            case StreamFailed():
                self._on_failed(engine, message)
            case RoutedExperts():
                self._on_routes(engine, message)
            case Started():
                self._on_started(engine, message)
            case PagesWanted():
                self.pages.on_wanted(engine, message.key)
            case Admitted():
                self._on_admitted(engine, message)
            case EngineMetrics():
                self._on_metrics(engine, message)
            case RpcReply():
                self.calls.on_reply(engine.rank, message)
            case StatesObserved():
                self.states.on_observed(engine, message)
                self.on_engine_available()
            case Draining():
                engine.leaving = True
            case GoAway():
                reason = message.reason[:MAX_MESSAGE_LENGTH]
                self.on_gone(engine, f"The engine that ran this request ended: {reason}")
            case _:
                raise WireError(f"unexpected {type(message).__name__}")

    def _on_started(self, engine: EngineState, started: Started) -> None:
        if self.streams is None:
            raise WireError("a stream starts before any stream")
        stream = self.streams.running_stream(engine.rank, started.stream)
        if stream is not None:
            stream.started = True

    def _on_admitted(self, engine: EngineState, admitted: Admitted) -> None:
        if self.streams is None:
            raise WireError("a stream has a slot before any stream")
        stream = self.streams.running_stream(engine.rank, admitted.stream)
        if stream is not None:
            stream.reply.on_admitted(stream, admitted.queued, time.monotonic() - admitted.ran)

    def _on_failed(self, engine: EngineState, failed: StreamFailed) -> None:
        if self.streams is None:
            raise WireError("a failed stream before any stream")
        stream = self.streams.running_stream(engine.rank, failed.stream)
        if stream is None:
            return
        fresh = failed.position == 0 and self.streams.num_delivered(stream) == 0
        if failed.code in (OVERLOADED, UNAVAILABLE) and self.streams.is_wanted(stream):
            if stream.resumed_at >= 0:
                assert self._resumption is not None  # it has resumed the stream
                self._resumption.on_refused(stream, time.monotonic())
                self._watch_resumption()
                return
            if fresh and self._submit_to_next(stream):
                return
        if failed.code == PROMPT_GONE and self._submit_whole(engine, stream):
            return
        code, message = failed.code, failed.message[:MAX_MESSAGE_LENGTH]
        if code not in _STATUS:
            self.faults.record(engine.rank, INVALID_CODE, "a stream fails with the code %.60r", code)
            code = "engine_error"
        retry_after_ms = min(failed.retry_after_ms, MAX_RETRY_AFTER_MS)
        status = _STATUS[code]
        field = _FIELD.match(message) if status in (400, 404) else None
        param = None if field is None else field[1]
        self.streams.end(stream, StreamError(status, code, message, retry_after_ms, param))

    def _submit_whole(self, engine: EngineState, stream: Stream) -> bool:
        """Submit a stream again whose prompt the engine could not put together; False if its request has
        dropped it, or it was whole."""
        assert self.streams is not None
        request = stream.request
        if request is None or request.resubmitted or not self.streams.is_wanted(stream):
            return False
        if engine.sent_prompts is not None:
            engine.sent_prompts.clear()
        stream.request = replace(request, resubmitted=True)  # such a one is sent whole
        self._connections.submit(engine, stream.request, owner=stream.reply)
        return True

    def _submit_to_next(self, stream: Stream) -> bool:
        """Submit a stream that an engine rejected, which cannot run it now, to the next engine.

        False if every engine that may run it has rejected it.
        """
        assert self.streams is not None
        assert stream.request is not None  # it was submitted
        if stream.pinned_rank is not None:
            return False
        stream.refusals += 1
        candidates = self._candidates(stream.request.adapter_key)
        if stream.refusals >= len(candidates):
            return False
        following = next((engine for engine in candidates if engine.rank > stream.rank), candidates[0])
        self.streams.assign(stream, following.rank)
        self._connections.submit(following, stream.request, owner=stream.reply)
        return True

    def _on_metrics(self, engine: EngineState, message: EngineMetrics) -> None:
        engine.waiting, engine.running = message.waiting, message.running
        engine.kv_used, engine.deferred = message.kv_used, message.deferred
        try:
            self._take_snapshot(engine, message.snapshot)
        finally:
            if message.query:
                self.metrics_queries.on_answer(engine.rank, message.query)

    def _take_snapshot(self, engine: EngineState, data: bytes) -> None:
        try:
            snapshot = decode_snapshot(data)
            expected = process_name("engine", engine.rank), engine.incarnation, engine.epoch
            if snapshot.key != expected:
                raise ValueError(f"metrics of {snapshot.key}, not of {expected}")
        except ValueError as error:
            self.faults.record(engine.rank, INVALID_METRICS, "%.300s", error)
            return
        self.board.add_or_log(snapshot, data)

    def ended_engines(self) -> list[ProcessKey]:
        """The engine processes on the board that have ended."""
        alive = {
            (process_name("engine", engine.rank), engine.incarnation, engine.epoch)
            for engine in self.engines
            if engine.up
        }
        return [key for key in self.board.starts() if key not in alive and role_of(key[0]) == "engine"]

    def on_load(self, load: EngineLoad) -> None:
        """The coordinator sent one engine's load."""
        engine = self.engines[load.rank] if load.rank < len(self.engines) else None
        if engine is None or not engine.up:
            return
        if (engine.incarnation, engine.epoch) == (load.incarnation, load.epoch):
            engine.update_load(
                step=load.step,
                waiting=load.waiting,
                running=load.running,
                kv_used=load.kv_used,
                accepted=load.accepted,
                now=time.monotonic(),
            )
