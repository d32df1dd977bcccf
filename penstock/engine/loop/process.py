"""The engine process: one data-parallel rank, in a loop of drain the inbox, step, publish.

The supervisor starts it and sends its configuration over the control channel. The process owns the engine
(scheduler, KV cache, model) and the socket that API servers connect to. It reads their Hello, Submit, Abort,
RpcCall and Disconnect, and writes one token frame per API server and step. It ends on Stop (API servers get
GoAway; exit code 0), when the supervisor is gone, or when the engine breaks (API servers get GoAway; the
exception leaves :func:`run`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.adapters.errors import AdapterError
from penstock.config.errors import ConfigError
from penstock.engine.base import Engine, StepRows
from penstock.engine.group.membership import EngineMembership, listening_address
from penstock.engine.group.wave_group import WaveGroup
from penstock.engine.kv_events.publisher import KVEventPublisher
from penstock.engine.loop.build_engine import build_engine
from penstock.engine.loop.identity import EngineIdentity
from penstock.engine.loop.inbox import Inbox, InboxHooks
from penstock.engine.loop.loop_states import LoopStates
from penstock.engine.loop.metrics_reporter import MetricsReporter
from penstock.engine.loop.profiler import EngineProfiler
from penstock.engine.loop.publisher import Publisher
from penstock.engine.loop.rpc import RpcServer
from penstock.engine.loop.stats import EngineStats
from penstock.engine.loop.stream_spans import EndedStream, StreamSpans, describe
from penstock.engine.lora.adapter_state import AdapterState
from penstock.metrics.gc_policy import GarbageCollector
from penstock.metrics.memory import Trimmer
from penstock.telemetry.spans import BatchSpanExporter, make_span_exporter
from penstock.wire.adapter_list import ADAPTERS, AdapterList
from penstock.wire.channel import ControlChannel, SupervisorGone
from penstock.wire.control import HEARTBEAT_INTERVAL_S, Drain, Info, Launch, Stop, SupervisorCommand
from penstock.wire.coordination import BUILD
from penstock.wire.messages import Draining, EngineInfo, GoAway
from penstock.wire.sockets import RouterSocket

log = logging.getLogger(__name__)

CONTROL_INTERVAL_S = 0.05
"""Seconds between two reads of the control channel while the engine is busy."""
RETRY_INTERVAL_S = 0.01
"""Seconds between two attempts to flush the backlog of slow peers while the engine is idle, and between two
looks whether an adapter's files have been read."""
IDLE_DELAY_S = 0.05
"""Seconds without messages before an idle engine collects garbage and reports metrics."""
SHUTDOWN_FLUSH_TIMEOUT_S = 2.0
"""Seconds for peers to take the last messages; the supervisor waits 5 s after Stop."""
GROUP_EXIT_TIMEOUT_S = 2.0
"""Further seconds that a rank of a wave group steps along for its peers. All are stopped at the same time."""
PROBE_INTERVAL_S = 1.0
"""Minimum seconds between two looks for API servers whose connection has broken."""
DRAIN_GRACE_S = 0.5
"""Seconds that a draining engine waits for requests that API servers sent before they received Draining."""
MESSAGES_PER_STEP = 1024
"""Messages handled before the next step, where a large one counts once per BYTES_PER_MESSAGE: a flood of
requests must not delay running streams."""
BYTES_PER_MESSAGE = 1 << 14


class CommandChannel(Protocol):
    """The part of :class:`ControlChannel` that the loop uses."""

    def receive(self) -> list[SupervisorCommand]: ...

    def heartbeat(self) -> None: ...

    def fileno(self) -> int: ...


def run(control: ControlChannel) -> int:
    """Run the engine of ``control.launch``; return the exit code.

    Raises what starting raises (ConfigError, zmq.ZMQError, the engine's own), what breaks the engine, and
    SupervisorGone.
    """
    launch = control.launch
    engine = build_engine(launch, control.progress)
    try:
        adapters = _load_adapters(engine, launch, control)
        remote = launch.index not in launch.local_ranks
        socket = RouterSocket(listening_address(launch), key=launch.key if remote else None)
        try:
            config = launch.config
            collector = GarbageCollector(config.gc_policy)
            with ExitStack() as links:
                membership = EngineMembership.from_launch(launch, socket.address, engine.info)
                group = WaveGroup.from_launch(launch)
                for link in (membership, group):
                    if link is not None:
                        links.callback(link.close)
                if remote and membership is not None:
                    membership.wait_until_joined(control.progress)
                kv_events = _kv_event_publisher(launch)
                if kv_events is not None:
                    links.callback(kv_events.close)
                loop = EngineLoop(
                    engine,
                    socket,
                    EngineIdentity(
                        launch.index,
                        launch.epoch,
                        launch.incarnation,
                        launch.traits.get(BUILD, ""),
                        launch.served_model_names[0],
                    ),
                    LoopParts(
                        collector=collector,
                        membership=membership,
                        group=group,
                        profile_dir=config.profile_dir,
                        span_exporter=_span_exporter(launch),
                        kv_events=kv_events,
                        adapters=adapters,
                        kept_prompt_bytes=config.kept_prompt_bytes,
                        tells_times=config.enable_per_request_metrics,
                    ),
                )
                collector.start()
                control.ready(ready_info(engine.info))
                loop.run(control)
        finally:
            socket.close()
    finally:
        engine.close()
    return 0


def _load_adapters(engine: Engine, launch: Launch, control: ControlChannel) -> AdapterState | None:
    """The state of the engine's adapters, with those that were desired before its start; None: it runs none.
    Raises ConfigError if the engine has never served and one cannot be loaded."""
    if engine.adapters is None:
        return None
    state = AdapterState(engine.adapters)
    for desired in () if launch.desired is None else launch.desired.states:
        if desired.name == ADAPTERS:
            control.progress("loading adapters", None)
            adapters = msgspec.convert(desired.value, AdapterList).adapters
            try:
                state.load_at_start(adapters, tolerant=launch.epoch > 0)
            except AdapterError as error:
                raise ConfigError(str(error)) from None
    return state


def _span_exporter(launch: Launch) -> BatchSpanExporter[EndedStream] | None:
    """The exporter of the engine's spans; None: they are off. Raises ConfigError."""
    if launch.config.otlp_endpoint is None:
        return None
    return make_span_exporter(
        launch.config.otlp_endpoint,
        describe,
        service=launch.config.otlp_service_name,
        scope="penstock.engine",
        instance=launch.instance,
    )


def _kv_event_publisher(launch: Launch) -> KVEventPublisher | None:
    """The publisher of the engine's KV cache events; None: there are none, or vLLM publishes them. Raises
    ConfigError."""
    config = launch.config
    if config.engine == "vllm" or not config.kv_events.publishes:
        return None
    return KVEventPublisher(config.kv_events, launch.index)


def ready_info(info: EngineInfo) -> Info:
    """The facts about the engine that the banner shows. Empty ones are omitted."""
    facts: Info = {
        "device": info.device,
        "dtype": info.dtype,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "kv_cache_tokens": info.kv_cache_tokens,
    }
    return {name: value for name, value in facts.items() if value}


class LoopParts(NamedTuple):
    """What an engine loop has beside its engine."""

    collector: GarbageCollector | None = None
    """None: Python's own garbage collection stays on."""
    membership: EngineMembership | None = None
    """None: there is no coordinator."""
    group: WaveGroup | None = None
    """None: the engine steps whenever it has work."""
    profile_dir: str | None = None
    """None: profiling is off."""
    span_exporter: BatchSpanExporter[EndedStream] | None = None
    """None: streams have no spans."""
    kv_events: KVEventPublisher | None = None
    """None: the engine has none to publish."""
    adapters: AdapterState | None = None
    """None: the engine runs none."""
    kept_prompt_bytes: int = 0
    """Bytes of prompts that are kept for API servers."""
    tells_times: bool = False
    """Whether API servers are told of each stream that gets a slot."""


NO_PARTS = LoopParts()


def _operations(
    engine: Engine, identity: EngineIdentity, parts: LoopParts
) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """RPC methods of what the loop has beside its engine."""
    operations: dict[str, Callable[[dict[str, Any]], Any]] = {}
    collector = parts.collector
    if collector is not None:
        operations["gc"] = lambda arguments: collector.report()
    if parts.profile_dir is not None:
        profiler = EngineProfiler(engine, parts.profile_dir, identity.rank, identity.epoch)
        operations["start_profile"] = lambda arguments: profiler.start()
        operations["stop_profile"] = lambda arguments: profiler.stop()
    return operations


class EngineLoop:
    """Drain the inbox, step, publish; wait when there is nothing to do."""

    def __init__(
        self,
        engine: Engine,
        socket: RouterSocket,
        identity: EngineIdentity,
        parts: LoopParts = NO_PARTS,
    ) -> None:
        collector, membership = parts.collector, parts.membership
        self._engine = engine
        self._socket = socket
        self._publisher = Publisher(socket, parts.kept_prompt_bytes, tells_times=parts.tells_times)
        self._kv_events = parts.kv_events
        engine.on_resubmitted_start(self._publisher.start)
        self._group = parts.group
        self._clock = time.monotonic
        self._states = LoopStates(
            engine,
            self._publisher,
            parts.adapters,
            in_wave=lambda: self._group is not None and self._group.in_wave,
            publish=lambda rows: self._publish(rows, self._clock()),
            beat=self._beat,
            clock=lambda: self._clock(),
        )
        self._operations = self._states.operations | _operations(engine, identity, parts)
        """RPC methods of the process; all others are the engine's."""
        self._stats = EngineStats()
        self._spans = StreamSpans(parts.span_exporter, self._stats, identity.rank, identity.model)
        self._reporter = MetricsReporter(
            engine,
            self._publisher,
            self._stats,
            collector,
            identity,
            sleep_level=lambda: self._states.sleep_level,
            spans=self._spans.counts,
        )
        self._inbox = Inbox(
            engine,
            self._publisher,
            identity,
            calls=RpcServer(self._run_operation, self._publisher.send, lambda: self._publisher.step),
            states=self._states.reconciler,
            stats=self._stats,
            spans=self._spans,
            hooks=InboxHooks(
                on_metrics_query=self._reporter.on_query,
                refuse_streams=self._states.refusal,
                current_head=(lambda: identity.incarnation)
                if membership is None
                else membership.current_head,
                probe=self._probe_servers,
            ),
        )
        self._collector = collector
        self._trimmer = Trimmer()
        self._membership = membership
        self._next_control = self._next_heartbeat = self._next_probe = 0.0
        self._disconnects = 0
        """``disconnects`` of the socket at the last probe."""
        self._commands: CommandChannel | None = None
        """None: the loop does not run yet."""
        self._stopped = False
        self._draining = False
        """The host is ending: the engine finishes what it runs and asks for no new streams."""
        self._drain_until = 0.0
        self._draining_sent_to = 0
        """``attach_count`` of the peers when Draining was last sent."""

    def run(self, commands: CommandChannel) -> None:
        """Loop until Stop. Raises what the engine raises, after GoAway to the API servers, and
        SupervisorGone."""
        self._commands = commands
        try:
            while not self._stopped:
                self.run_once(commands)
        except SupervisorGone:
            raise  # everything ends
        except Exception:
            # Clients get this reason; the supervisor logs the error.
            self._shut_down("it failed")
            raise
        self._shut_down("engine is shutting down")
        if self._group is not None:
            self._leave_group(self._group, commands)

    def run_once(self, commands: CommandChannel) -> None:
        """Drain the inbox, step, publish; or wait when there is nothing to do."""
        self._drain_inbox()
        self._advance_states()
        can_step = self._engine.can_step()
        if self._may_step(can_step):
            now = self._step_and_publish() if can_step else self._dummy_step()
            self._reporter.answer_queries()
            self._poll_control(commands, now)
        else:
            self._wait(commands)
        self._inbox.drop_disconnected()
        if self._kv_events is not None:
            self._kv_events.publish(self._engine.take_kv_events())

    # -- the inbox

    def _drain_inbox(self) -> None:
        handled = 0
        while handled < MESSAGES_PER_STEP:
            if self._inbox.waiting:
                handled += 1 + self._inbox.handle() // BYTES_PER_MESSAGE
                continue
            message = self._socket.receive()
            if message is None:
                return
            handled += 1
            if self._group is None or not self._group.try_handle(*message):
                self._inbox.receive(*message)

    def _probe_servers(self) -> None:
        """Send metrics to every API server, and drop those whose connection has broken: ZMQ tells only who
        sends. At most every :data:`PROBE_INTERVAL_S`."""
        now = self._clock()
        if now >= self._next_probe:
            self._next_probe = now + PROBE_INTERVAL_S
            self._disconnects = self._socket.disconnects
            self._reporter.report(now)
            self._publisher.flush()
            self._inbox.drop_disconnected()

    # -- the step

    def _may_step(self, can_step: bool) -> bool:
        """Whether to step: when there is work, or when the wave group needs a dummy step."""
        if self._group is None:
            return can_step
        may_step = self._group.advance(can_step and not self._stopped)
        self._stats.waves = self._group.waves
        return may_step

    def _step_and_publish(self) -> float:
        """Return the clock's time at the end of the step."""
        began = self._clock()
        rows = self._engine.step()
        now = self._clock()
        if self._engine.pages is not None:
            for server, message in self._engine.pages.take_wanted():
                self._publisher.send(server, message)
        admitted = self._engine.take_admitted()
        self._stats.admit(admitted, began)
        if self._publisher.tells_times:
            for server, number in admitted:
                queued = began - self._stats.times_of(number).arrived
                self._publisher.admit(server, number, max(0.0, queued), now - began)
        self._stats.preempt(self._engine.take_preempted())
        self._publish(rows, now)
        return now

    def _publish(self, rows: StepRows, now: float) -> None:
        load = self._engine.load()
        self._stats.on_rows(rows, now, load.generated)
        self._spans.on_rows(rows, now)
        self._publisher.publish(self._publisher.peers.to_handles(rows), load)

    def _dummy_step(self) -> float:
        """A step without rows, for the other ranks of the group. Returns the clock's time at its end."""
        self._engine.dummy_step()
        self._stats.on_dummy_step()
        self._publisher.flush()
        return self._clock()

    # -- states and calls

    def _advance_states(self) -> None:
        """Apply desired states as far as possible, and send metrics to API servers that have just
        connected."""
        self._states.advance()
        if self._reporter.has_new_server:
            self._reporter.report(self._clock())

    def _run_operation(self, method: str, arguments: dict[str, Any]) -> Any:
        operation = self._operations.get(method)
        return self._engine.call(method, arguments) if operation is None else operation(arguments)

    # -- the supervisor's commands

    def _poll_control(self, commands: CommandChannel, now: float) -> None:
        """Handle commands and report, at most every :data:`CONTROL_INTERVAL_S`, while busy."""
        if now >= self._next_control:
            self._next_control = now + CONTROL_INTERVAL_S
            self._handle_commands(commands)
            if self._collector is not None:
                self._collector.on_busy()
            self._reporter.report_if_due(now)
            self._trimmer.watch(self._publisher.peers.open_streams, idle=False)
            self._report_to_coordinator(now, idle=False)

    def _report_to_coordinator(self, now: float, *, idle: bool) -> None:
        publisher = self._publisher
        if self._membership is not None:
            load = self._engine.load()
            self._membership.poll(now, load, publisher.peers.accepted(), publisher.step, idle=idle)

    def _handle_commands(self, commands: CommandChannel) -> None:
        """Carry out the supervisor's commands, and send the heartbeat when it is due."""
        now = self._clock()
        self._beat()
        if self._disconnects != self._socket.disconnects:
            self._probe_servers()
        for command in commands.receive():
            if isinstance(command, Stop):
                self._stopped = True
            elif isinstance(command, Drain) and not self._draining:
                self._draining = True
                self._drain_until = now + DRAIN_GRACE_S
        if self._draining:
            self._continue_drain(now)

    def _beat(self) -> None:
        """Send the heartbeat when it is due."""
        now = self._clock()
        if self._commands is not None and now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_INTERVAL_S
            self._commands.heartbeat()

    def _continue_drain(self, now: float) -> None:
        """Send Draining to API servers, including ones that connect later, and stop when no stream runs."""
        if self._draining_sent_to != self._publisher.peers.attach_count:
            self._draining_sent_to = self._publisher.peers.attach_count
            self._publisher.send_to_all(Draining())
        if now >= self._drain_until and not self._engine.has_work():
            self._stopped = True

    # -- nothing to do

    def _wait(self, commands: CommandChannel) -> None:
        """Wait for a message, a command or the next heartbeat; the first pause collects garbage and reports
        metrics. An engine that computes elsewhere is busy while it waits for output."""
        self._reporter.answer_queries()
        self._publisher.flush()
        idle = not self._engine.has_work()
        now = self._clock()
        if idle or now >= self._next_control:
            self._report_to_coordinator(now, idle=idle)
        if not idle:
            self._reporter.report_if_due(now)
        collector = self._collector
        timeout = HEARTBEAT_INTERVAL_S
        if self._publisher.has_backlog:
            timeout = RETRY_INTERVAL_S
        elif self._draining or self._reporter.pending or (collector is not None and collector.due):
            timeout = IDLE_DELAY_S
        if self._states.is_reading:
            timeout = RETRY_INTERVAL_S
        if self._inbox.waiting:
            timeout = 0.0
        if not self._socket.wait(timeout, commands.fileno(), *self._engine.wakeups):
            if collector is not None:
                collector.on_idle()
            if self._reporter.pending:
                self._reporter.report(self._clock())
            self._trimmer.watch(self._publisher.peers.open_streams, idle=idle)
        elif not idle and self._clock() < self._next_control:
            return
        self._next_control = self._clock() + CONTROL_INTERVAL_S
        self._handle_commands(commands)

    # -- the end

    def _shut_down(self, reason: str) -> None:
        """Publish all tokens that were held back, then send GoAway, which ends every stream here."""
        rows = self._engine.fail_all("engine_error", reason)
        self._spans.on_rows(rows, self._clock())
        rows.failed = ()
        self._publisher.publish(self._publisher.peers.to_handles(rows), self._engine.load())
        self._reporter.report(self._clock())
        self._publisher.send_to_all(GoAway(reason))
        deadline = self._clock() + SHUTDOWN_FLUSH_TIMEOUT_S
        while self._publisher.has_backlog and self._clock() < deadline:
            time.sleep(RETRY_INTERVAL_S)
            self._publisher.flush()
        self._spans.close()

    def _leave_group(self, group: WaveGroup, commands: CommandChannel) -> None:
        """Step along while peers need it: they may not have received Stop yet."""
        group.leave()
        deadline = self._clock() + GROUP_EXIT_TIMEOUT_S
        while self._clock() < deadline:
            self._drain_inbox()
            if group.may_exit:
                return
            self.run_once(commands)
