"""The engine process: one data-parallel rank.

The supervisor starts it and tells it on the control channel what to run as. It owns the engine (scheduler,
KV cache, model) and the socket that API servers connect to; it reads their Hello, Submit, Abort, RpcCall and
Disconnect, and writes one token frame per API server and step. It ends when the supervisor says Stop (API
servers are told GoAway; exit code 0), when the supervisor is gone, or when the engine breaks (API servers
are told GoAway; the exception leaves :func:`run`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from penstock.engine.base import Engine
from penstock.engine.group.membership import EngineMembership, listening_address
from penstock.engine.group.wave_group import WaveGroup
from penstock.engine.loop.inbox import Inbox
from penstock.engine.loop.metrics_reporter import MetricsReporter
from penstock.engine.loop.profiler import EngineProfiler
from penstock.engine.loop.publisher import Publisher
from penstock.engine.loop.rpc import RpcServer
from penstock.engine.loop.sleep import SleepState
from penstock.engine.loop.stats import EngineStats
from penstock.engine.loop.two_phase import TwoPhaseParticipant
from penstock.engine.schedule.waiting_queue import with_rank_limits
from penstock.metrics.gc_policy import GarbageCollector
from penstock.wire.channel import ControlChannel, SupervisorGone
from penstock.wire.control import HEARTBEAT_INTERVAL_S, Drain, Info, Launch, Stop, SupervisorCommand
from penstock.wire.messages import Draining, EngineInfo, GoAway
from penstock.wire.sockets import RouterSocket, process_group_spec

log = logging.getLogger(__name__)

CONTROL_INTERVAL_S = 0.05
"""How often a busy engine looks at the control channel."""
RETRY_INTERVAL_S = 0.01
"""How often an idle engine tries again to send what a peer had no room for."""
IDLE_DELAY_S = 0.05
"""How long nothing must come before garbage is collected and metrics are reported."""
SHUTDOWN_FLUSH_TIMEOUT_S = 2.0
"""Time for peers to make room for the last messages; the supervisor waits 5 s after Stop."""
GROUP_EXIT_TIMEOUT_S = 2.0
"""How long an engine in lock-step stays for its peers after that. All are told to stop at the same time."""
DRAIN_GRACE_S = 0.5
"""How long an engine whose host ends waits for what API servers sent before they heard of it."""
MESSAGES_PER_STEP = 256
"""Messages taken before the next step, so that no flood of requests keeps running streams waiting."""


class CommandChannel(Protocol):
    """What a :class:`ControlChannel` is to the loop."""

    def receive(self) -> list[SupervisorCommand]: ...

    def heartbeat(self) -> None: ...

    def fileno(self) -> int: ...


def run(control: ControlChannel) -> int:
    """Be the engine that ``control`` asks for; returns the exit code. Raises what starting raises
    (ConfigError, zmq.ZMQError, the engine's own), what breaks the engine, and SupervisorGone."""
    launch = control.launch
    engine = build_engine(launch, control.progress)
    try:
        remote = launch.index not in launch.local_ranks
        socket = RouterSocket(listening_address(launch), key=launch.key if remote else None)
        try:
            config = launch.config
            collector = GarbageCollector(config.gc_policy, config.gc_pause_budget_ms / 1000)
            model = launch.served_model_names[0]
            with ExitStack() as links:
                membership = EngineMembership.from_launch(launch, socket.address, engine.info)
                lockstep = WaveGroup.from_launch(launch)
                for link in (membership, lockstep):
                    if link is not None:
                        links.callback(link.close)
                if remote and membership is not None:
                    membership.wait_until_joined(control.progress)
                loop = EngineLoop(
                    engine,
                    socket,
                    launch.index,
                    launch.epoch,
                    collector,
                    membership,
                    lockstep,
                    model=model,
                    incarnation=launch.incarnation,
                    profile_dir=config.profile_dir,
                )
                collector.start()
                control.ready(ready_info(engine.info))
                loop.run(control)
        finally:
            socket.close()
    finally:
        engine.close()
    return 0


def build_engine(launch: Launch, progress: Callable[[str, float | None], None]) -> Engine:
    """The engine of ``launch.config.engine``. Only its code is imported."""
    config = with_rank_limits(launch.config, launch.index)
    if config.engine == "synthetic":
        from penstock.engine.synthetic.engine import SyntheticEngine

        return SyntheticEngine(config, launch.model_dir, progress, tokenizer_dir=launch.tokenizer_dir)
    place = None
    if config.enable_expert_parallel:
        place = process_group_spec(
            launch.run_dir, launch.index, launch.engine_count, launch.epoch, launch.incarnation
        )
    if config.engine == "vllm":
        from penstock.engine.vllm.versions import check_installed

        check_installed()  # before its import, which another version may fail
        from penstock.engine.vllm.engine import VllmEngine

        return VllmEngine(
            config, launch.model_dir, progress, rank=launch.index, given=launch.given, place=place
        )
    from penstock.engine.torch.engine import TorchEngine

    return TorchEngine(config, launch.model_dir, progress, tokenizer_dir=launch.tokenizer_dir, place=place)


def ready_info(info: EngineInfo) -> Info:
    """What the operator is shown; facts that an engine does not have are left out."""
    facts: Info = {
        "device": info.device,
        "dtype": info.dtype,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "kv_cache_tokens": info.kv_cache_tokens,
    }
    return {name: value for name, value in facts.items() if value}


class EngineLoop:
    """Drain the inbox, step, publish; wait when there is nothing to do."""

    def __init__(
        self,
        engine: Engine,
        socket: RouterSocket,
        rank: int,
        epoch: int,
        collector: GarbageCollector | None = None,
        membership: EngineMembership | None = None,
        lockstep: WaveGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
        model: str = "",
        incarnation: int = 0,
        profile_dir: str | None = None,
    ) -> None:
        """``collector`` None: Python's own garbage collection stays as it is. ``membership`` None: there is
        no coordinator. ``lockstep`` None: the engine steps when it has work. ``model`` labels metrics.
        ``profile_dir`` None: nothing can be profiled."""
        self._engine = engine
        self._socket = socket
        self._publisher = Publisher(socket, clock)
        self._operations: dict[str, Callable[[], Any]] = {"metrics": engine.metrics}
        if collector is not None:
            self._operations["gc"] = collector.report
        if profile_dir is not None:
            recording = EngineProfiler(engine, profile_dir, rank, epoch)
            self._operations |= {"start_profile": recording.start, "stop_profile": recording.stop}
        self._stats = EngineStats()
        sleep = SleepState(engine, self._end_streams, self._is_idle)
        self._calls = RpcServer(
            self._run_operation,
            {SleepState.name: TwoPhaseParticipant(SleepState.name, sleep)},
            self._publisher.send,
            lambda: self._publisher.step,
        )
        self._inbox = Inbox(
            engine,
            self._publisher,
            rank,
            epoch,
            self._calls,
            self._stats,
            clock,
            incarnation=incarnation,
            refuse_streams=sleep.refusal,
        )
        self._reporter = MetricsReporter(
            engine, self._stats, collector, self._publisher, rank, epoch, model, incarnation
        )
        self._collector = collector
        self._membership = membership
        self._lockstep = lockstep
        self._clock = clock
        self._next_control = self._next_beat = 0.0
        self._stopped = False
        self._draining = False
        """Its host ends: it finishes what it runs, and wants nothing new."""
        self._drain_until = 0.0
        self._draining_sent_to = 0
        """How many API servers had ever come when they were told."""

    def run(self, orders: CommandChannel) -> None:
        """Until the order to stop. Raises what the engine raises, after telling the API servers, and
        SupervisorGone."""
        try:
            while not self._stopped:
                self.run_once(orders)
        except SupervisorGone:
            raise  # everything ends
        except Exception as error:
            self._shut_down(f"{type(error).__name__}: {error}")
            raise
        self._shut_down("engine is shutting down")
        if self._lockstep is not None:
            self._leave_group(self._lockstep, orders)

    def run_once(self, orders: CommandChannel) -> None:
        """One step with what leads to it and follows from it, or one wait for something to do."""
        self._drain_inbox()
        self._calls.answer_pending()
        if self._reporter.has_new_server:
            self._reporter.report(self._clock())
        has_work = self._engine.has_work()
        may_step = has_work if self._lockstep is None else self._may_step(self._lockstep, has_work)
        if may_step:
            self._poll_control(orders, self._step() if has_work else self._dummy_step())
        else:
            self._wait(orders)
        for server in self._publisher.take_disconnected():
            log.info("API server %d is gone, its streams are dropped", server)
            self._inbox.drop_server(server)

    def _drain_inbox(self) -> None:
        for _ in range(MESSAGES_PER_STEP):
            message = self._socket.receive()
            if message is None:
                return
            if self._lockstep is None or not self._lockstep.try_handle(*message):
                self._inbox.handle(*message)

    # -- the step

    def _step(self) -> float:
        """Returns when it was made."""
        began = self._clock()
        rows = self._engine.step()
        now = self._clock()
        self._stats.admit(self._engine.take_admitted(), began)
        self._stats.on_rows(rows, now)
        self._publisher.publish(rows, self._engine.load())
        return now

    def _dummy_step(self) -> float:
        """A step that others need. Returns when it was made."""
        self._engine.dummy_step()
        self._stats.on_dummy_step()
        self._publisher.flush()
        return self._clock()

    def _may_step(self, lockstep: WaveGroup, has_work: bool) -> bool:
        may_step = lockstep.advance(has_work and not self._stopped)
        self._stats.waves = lockstep.waves
        return may_step

    # -- calls

    def _run_operation(self, method: str, arguments: dict[str, Any]) -> Any:
        """One of the process's, or else the engine's."""
        operation = self._operations.get(method)
        return self._engine.call(method, arguments) if operation is None else operation()

    def _is_idle(self) -> bool:
        """Whether neither this engine nor one in lock-step with it has anything to do."""
        return not self._engine.has_work() and (self._lockstep is None or not self._lockstep.in_wave)

    def _end_streams(self, code: str, message: str) -> None:
        rows = self._engine.fail_all(code, message)
        self._stats.on_rows(rows, self._clock())
        self._publisher.publish(rows, self._engine.load())

    # -- the supervisor's orders

    def _poll_control(self, orders: CommandChannel, now: float) -> None:
        """While busy, at a bounded rate."""
        if now >= self._next_control:
            self._next_control = now + CONTROL_INTERVAL_S
            self._handle_commands(orders)
            if self._collector is not None:
                self._collector.on_busy()
            self._reporter.report_if_due(now)
            self._report_to_coordinator(now, idle=False)

    def _report_to_coordinator(self, now: float, *, idle: bool) -> None:
        publisher = self._publisher
        if self._membership is not None:
            load = self._engine.load()
            self._membership.poll(now, load, publisher.accepted(), publisher.step, idle=idle)

    def _handle_commands(self, orders: CommandChannel) -> None:
        """Follow the supervisor's orders, and let it know from time to time that the loop turns."""
        now = self._clock()
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_INTERVAL_S
            orders.heartbeat()
        for order in orders.receive():
            if isinstance(order, Stop):
                self._stopped = True
            elif isinstance(order, Drain) and not self._draining:
                self._draining = True
                self._drain_until = now + DRAIN_GRACE_S
        if self._draining:
            self._continue_drain(now)

    def _continue_drain(self, now: float) -> None:
        """Tell API servers, also those that come late, and end when nothing runs any longer."""
        if self._draining_sent_to != self._publisher.attach_count:
            self._draining_sent_to = self._publisher.attach_count
            self._publisher.send_to_all(Draining())
        if now >= self._drain_until and not self._engine.has_work():
            self._stopped = True

    # -- nothing to do

    def _wait(self, orders: CommandChannel) -> None:
        """Until a message, an order or the next beat. The first pause is for garbage and metrics."""
        self._publisher.flush()
        self._report_to_coordinator(self._clock(), idle=True)
        collector = self._collector
        timeout = HEARTBEAT_INTERVAL_S
        if self._publisher.has_backlog:
            timeout = RETRY_INTERVAL_S
        elif self._draining or self._reporter.pending or (collector is not None and collector.due):
            timeout = IDLE_DELAY_S
        if not self._socket.wait(timeout, orders.fileno()):
            if collector is not None:
                collector.on_idle()
            if self._reporter.pending:
                self._reporter.report(self._clock())
        self._handle_commands(orders)

    # -- the end

    def _shut_down(self, reason: str) -> None:
        """Give out all tokens that were held back, then say goodbye, which ends every stream here."""
        rows = self._engine.fail_all("engine_error", reason)
        rows.failed = ()
        self._publisher.publish(rows, self._engine.load())
        self._reporter.report(self._clock())
        self._publisher.send_to_all(GoAway(reason))
        deadline = self._clock() + SHUTDOWN_FLUSH_TIMEOUT_S
        while self._publisher.has_backlog and self._clock() < deadline:
            time.sleep(RETRY_INTERVAL_S)
            self._publisher.flush()

    def _leave_group(self, lockstep: WaveGroup, orders: CommandChannel) -> None:
        """Step along as long as peers need it, which may not have been told to stop yet."""
        lockstep.leave()
        deadline = self._clock() + GROUP_EXIT_TIMEOUT_S
        while self._clock() < deadline:
            self._drain_inbox()
            if lockstep.may_exit:
                return
            self.run_once(orders)
