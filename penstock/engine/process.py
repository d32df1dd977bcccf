"""The engine process: one data-parallel rank.

The supervisor starts it and tells it on the control channel what to run as. It owns the engine (scheduler,
KV cache, model) and the socket that API servers connect to; it reads their Hello, Submit, Abort, Call and
Bye, and writes one token frame per API server and step. It ends when the supervisor says Stop (API
servers are told Goodbye; exit code 0), when the supervisor is gone, or when the engine breaks (API servers
are told Goodbye; the exception leaves :func:`run`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from penstock.engine.base import Engine
from penstock.engine.calls import EngineCalls
from penstock.engine.inbox import Inbox
from penstock.engine.lockstep import Lockstep
from penstock.engine.membership import Membership, listening_address
from penstock.engine.participant import Participant
from penstock.engine.publisher import Publisher
from penstock.engine.recording import Recording
from penstock.engine.reporter import Reporter
from penstock.engine.sleep import Sleep
from penstock.engine.stats import EngineStats
from penstock.engine.waiting import own_share
from penstock.metrics.garbage import Collector
from penstock.wire.channel import ControlChannel, SupervisorGone
from penstock.wire.control import BEAT_INTERVAL_S, Drain, Info, Launch, Order, Stop
from penstock.wire.messages import EngineInfo, Goodbye, Leaving
from penstock.wire.sockets import RouterSocket, place_of

log = logging.getLogger(__name__)

CONTROL_INTERVAL_S = 0.05
"""How often a busy engine looks at the control channel."""
RETRY_INTERVAL_S = 0.01
"""How often an idle engine tries again to send what a peer had no room for."""
PAUSE_S = 0.05
"""How long nothing must come before garbage is collected and metrics are reported."""
FAREWELL_S = 2.0
"""Time for peers to make room for the last messages; the supervisor waits 5 s after Stop."""
LEAVE_S = 2.0
"""How long an engine in lock-step stays for its peers after that. All are told to stop at the same time."""
LATECOMERS_S = 0.5
"""How long an engine whose host ends waits for what API servers sent before they heard of it."""
MESSAGES_PER_STEP = 256
"""Messages taken before the next step, so that no flood of requests keeps running streams waiting."""


class Orders(Protocol):
    """What a :class:`ControlChannel` is to the loop."""

    def receive(self) -> list[Order]: ...

    def beat(self) -> None: ...

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
            collector = Collector(config.gc_policy, config.gc_pause_budget_ms / 1000)
            model = launch.served_model_names[0]
            with ExitStack() as links:
                membership = Membership.of(launch, socket.address, engine.info)
                lockstep = Lockstep.of(launch)
                for link in (membership, lockstep):
                    if link is not None:
                        links.callback(link.close)
                if remote and membership is not None:
                    membership.wait(control.progress)
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
    config = own_share(launch.config, launch.index)
    if config.engine == "synthetic":
        from penstock.engine.synthetic import SyntheticEngine

        return SyntheticEngine(config, launch.model_dir, progress, tokenizer_dir=launch.tokenizer_dir)
    place = None
    if config.enable_expert_parallel:
        place = place_of(launch.run_dir, launch.index, launch.engine_count, launch.epoch, launch.incarnation)
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
        collector: Collector | None = None,
        membership: Membership | None = None,
        lockstep: Lockstep | None = None,
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
            recording = Recording(engine, profile_dir, rank, epoch)
            self._operations |= {"start_profile": recording.start, "stop_profile": recording.stop}
        self._stats = EngineStats()
        sleep = Sleep(engine, self._end_streams, self._rests)
        self._calls = EngineCalls(
            self._run_operation,
            {Sleep.name: Participant(Sleep.name, sleep)},
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
        self._reporter = Reporter(
            engine, self._stats, collector, self._publisher, rank, epoch, model, incarnation
        )
        self._collector = collector
        self._membership = membership
        self._lockstep = lockstep
        self._clock = clock
        self._next_control = self._next_beat = 0.0
        self._stopped = False
        self._leaving = False
        """Its host ends: it finishes what it runs, and wants nothing new."""
        self._leave_at = 0.0
        self._told_leaving = 0
        """How many API servers had ever come when they were told."""

    def run(self, orders: Orders) -> None:
        """Until the order to stop. Raises what the engine raises, after telling the API servers, and
        SupervisorGone."""
        try:
            while not self._stopped:
                self.turn(orders)
        except SupervisorGone:
            raise  # everything ends
        except Exception as error:
            self._farewell(f"{type(error).__name__}: {error}")
            raise
        self._farewell("engine is shutting down")
        if self._lockstep is not None:
            self._leave(self._lockstep, orders)

    def turn(self, orders: Orders) -> None:
        """One step with what leads to it and follows from it, or one wait for something to do."""
        self._drain()
        self._calls.settle()
        if self._reporter.unheard:
            self._reporter.report(self._clock())
        has_work = self._engine.has_work()
        may_step = has_work if self._lockstep is None else self._may_step(self._lockstep, has_work)
        if may_step:
            self._look_at(orders, self._step() if has_work else self._idle_step())
        else:
            self._wait(orders)
        for server in self._publisher.take_gone():
            log.info("API server %d is gone, its streams are dropped", server)
            self._inbox.forget(server)

    def _drain(self) -> None:
        for _ in range(MESSAGES_PER_STEP):
            message = self._socket.receive()
            if message is None:
                return
            if self._lockstep is None or not self._lockstep.takes(*message):
                self._inbox.take(*message)

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

    def _idle_step(self) -> float:
        """A step that others need. Returns when it was made."""
        self._engine.idle_step()
        self._stats.on_dummy_step()
        self._publisher.flush()
        return self._clock()

    def _may_step(self, lockstep: Lockstep, has_work: bool) -> bool:
        may_step = lockstep.turn(has_work and not self._stopped)
        self._stats.waves = lockstep.waves
        return may_step

    # -- calls

    def _run_operation(self, method: str, arguments: dict[str, Any]) -> Any:
        """One of the process's, or else the engine's."""
        operation = self._operations.get(method)
        return self._engine.call(method, arguments) if operation is None else operation()

    def _rests(self) -> bool:
        """Whether neither this engine nor one in lock-step with it has anything to do."""
        return not self._engine.has_work() and (self._lockstep is None or not self._lockstep.awake)

    def _end_streams(self, code: str, message: str) -> None:
        rows = self._engine.fail_all(code, message)
        self._stats.on_rows(rows, self._clock())
        self._publisher.publish(rows, self._engine.load())

    # -- the supervisor's orders

    def _look_at(self, orders: Orders, now: float) -> None:
        """While busy, at a bounded rate."""
        if now >= self._next_control:
            self._next_control = now + CONTROL_INTERVAL_S
            self._obey(orders)
            if self._collector is not None:
                self._collector.on_busy()
            self._reporter.report_in_time(now)
            self._tell_coordinator(now, idle=False)

    def _tell_coordinator(self, now: float, *, idle: bool) -> None:
        publisher = self._publisher
        if self._membership is not None:
            load = self._engine.load()
            self._membership.turn(now, load, publisher.accepted(), publisher.step, idle=idle)

    def _obey(self, orders: Orders) -> None:
        """Follow the supervisor's orders, and let it know from time to time that the loop turns."""
        now = self._clock()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_INTERVAL_S
            orders.beat()
        for order in orders.receive():
            if isinstance(order, Stop):
                self._stopped = True
            elif isinstance(order, Drain) and not self._leaving:
                self._leaving = True
                self._leave_at = now + LATECOMERS_S
        if self._leaving:
            self._take_leave(now)

    def _take_leave(self, now: float) -> None:
        """Tell API servers, also those that come late, and end when nothing runs any longer."""
        if self._told_leaving != self._publisher.attachments:
            self._told_leaving = self._publisher.attachments
            self._publisher.send_to_all(Leaving())
        if now >= self._leave_at and not self._engine.has_work():
            self._stopped = True

    # -- nothing to do

    def _wait(self, orders: Orders) -> None:
        """Until a message, an order or the next beat. The first pause is for garbage and metrics."""
        self._publisher.flush()
        self._tell_coordinator(self._clock(), idle=True)
        collector = self._collector
        timeout = BEAT_INTERVAL_S
        if self._publisher.behind:
            timeout = RETRY_INTERVAL_S
        elif self._leaving or self._reporter.pending or (collector is not None and collector.due):
            timeout = PAUSE_S
        if not self._socket.wait(timeout, orders.fileno()):
            if collector is not None:
                collector.on_idle()
            if self._reporter.pending:
                self._reporter.report(self._clock())
        self._obey(orders)

    # -- the end

    def _farewell(self, reason: str) -> None:
        """Give out all tokens that were held back, then say goodbye, which ends every stream here."""
        rows = self._engine.fail_all("engine_error", reason)
        rows.failed = ()
        self._publisher.publish(rows, self._engine.load())
        self._reporter.report(self._clock())
        self._publisher.send_to_all(Goodbye(reason))
        deadline = self._clock() + FAREWELL_S
        while self._publisher.behind and self._clock() < deadline:
            time.sleep(RETRY_INTERVAL_S)
            self._publisher.flush()

    def _leave(self, lockstep: Lockstep, orders: Orders) -> None:
        """Step along as long as peers need it, which may not have been told to stop yet."""
        lockstep.leave()
        deadline = self._clock() + LEAVE_S
        while self._clock() < deadline:
            self._drain()
            if lockstep.may_end:
                return
            self.turn(orders)
