"""``penstock serve``: prepares what the processes need, runs them, cleans up."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from setproctitle import setproctitle

from penstock import logging_setup
from penstock.config.errors import ConfigError
from penstock.config.groups.hosts import HEAD
from penstock.config.introspect import options_of
from penstock.config.options import ServeConfig
from penstock.config.origins import Origins
from penstock.exit_codes import EXIT_FAILED, StartupError, exit_code_of
from penstock.http.api_key_file import load_api_keys
from penstock.http.listener import ListenSocket, open_listener
from penstock.http.tls import server_context
from penstock.metrics.gc_policy import GarbageCollector
from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.child_process import ChildProcess
from penstock.supervisor.children.module_command import module_command
from penstock.supervisor.children.process_manager import ProcessManager
from penstock.supervisor.event_loop import Supervisor
from penstock.supervisor.listening.acceptor import Acceptor
from penstock.supervisor.startup.banner import banner
from penstock.supervisor.startup.cluster import read_cluster_key, traits_of
from penstock.supervisor.startup.file_limit import raise_file_limit
from penstock.supervisor.startup.model_resolution import ResolvedModel, resolve_model
from penstock.supervisor.startup.progress_display import make_progress_display
from penstock.supervisor.startup.run_directory import RunDirectory
from penstock.wire.control import Info, Launch
from penstock.wire.sockets import coordinator_address, new_incarnation

log = logging.getLogger(__name__)

RAY_PROXY_COMMAND = module_command("penstock.placement.process_proxy")
"""Of what runs on a Ray cluster; not imported here, as Ray may not be installed."""
_API_SERVER_GROUPS = ("HTTP server", "CORS", "TLS", "Streaming")
_TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal that ends the process came before there was anything to drain."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def serve(
    config: ServeConfig, origins: Origins | None = None, *, child_command: Sequence[str] | None = None
) -> int:
    """Serves until a signal or a failure ends it; returns the exit code, see :mod:`.exits`.

    Must be called in the main thread. ``origins`` says where values of ``config`` were set; ``child_command``
    starts a child, for tests. Raises ConfigError, with nothing left behind, for options that cannot be run.
    """
    began = time.monotonic()
    command = child_command or module_command("penstock.supervisor.children.child_main")
    setproctitle("penstock: supervisor")
    logging_setup.configure("supervisor", config.log_level)
    for name, origin in (origins or {}).items():
        log.debug("%s is set by %s", name, origin)
    cluster_key = None if config.cluster_key_file is None else read_cluster_key(config.cluster_key_file)
    here = _local_api_server_count(config)
    if not here:
        _check_without_servers(config, origins or {})
    if not config.headless:
        config = load_api_keys(config, origins or {})
        server_context(config)  # the API servers make their own; what is wrong with it is told here, once
    try:
        with _handlers_restored(), contextlib.ExitStack() as owned, _interruptible():
            listener = owned.enter_context(open_listener(config, origins or {})) if here else None
            run_dir = owned.enter_context(RunDirectory(config.run_dir)).path
            model = resolve_model(config, run_dir)
            raise_file_limit()
            acceptor = None
            if listener is not None and here > 1:
                acceptor = owned.enter_context(Acceptor(listener.socket))
            traits = {} if config.coordinator is None else traits_of(config, model)
            given = sorted(origins or {})
            service = _Service(
                config, given, listener, acceptor, run_dir, model, cluster_key, traits, command, began
            )
            return service.run()
    except StartupError as error:
        log.error("%s", error)
        return EXIT_FAILED
    except Interrupted as interruption:
        return exit_code_of(interruption.signum)


@dataclass(frozen=True, slots=True)
class _Service:
    """All that is prepared when the processes are started."""

    config: ServeConfig
    # Fields of config that were set.
    given: list[str]
    # None on a host without API servers.
    listener: ListenSocket | None
    # Where there are several API servers here; one accepts itself.
    acceptor: Acceptor | None
    run_dir: str
    model: ResolvedModel
    cluster_key: str | None
    # What other hosts must have in common with this one.
    traits: dict[str, str]
    command: Sequence[str]
    # time.monotonic() when the user asked for it.
    began: float
    incarnation: int = field(default_factory=new_incarnation)

    def run(self) -> int:
        fleet = ProcessManager(
            engines=len(self.config.ranks),
            first_rank=self.config.ranks.start,
            all_engines=self.config.data_parallel_size,
            api_servers=0 if self.config.headless else self.config.api_server_count,
            startup_timeout=self.config.startup_timeout,
            drain_timeout=self.config.drain_timeout,
            engine_hang_timeout=self.config.engine_hang_timeout,
            coordinator=self._coordinator is not None and not self.config.headless,
            lockstep=self.config.enable_expert_parallel,
        )
        collector = GarbageCollector(self.config.gc_policy, self.config.gc_pause_budget_ms / 1000)
        with contextlib.closing(make_progress_display()) as shown:
            return Supervisor(fleet, self._start, shown, self._announce, collector).run()

    @property
    def _coordinator(self) -> str | None:
        """Where it is for the children of this supervisor. One API server and one engine, both here, have
        nothing to coordinate."""
        config = self.config
        if config.headless:
            return config.coordinator
        alone = config.api_server_count == config.data_parallel_size == 1 and config.coordinator is None
        return None if alone else coordinator_address(self.run_dir)

    @property
    def _on_cluster(self) -> bool:
        return self.config.data_parallel_backend == "ray"

    def _is_elsewhere(self, name: ProcessName) -> bool:
        """Only its stand-in runs here."""
        if name.role == "api-server":
            return self.config.host_of_server(name.index) != HEAD
        return self._on_cluster and name.role == "engine"

    def _start(self, name: ProcessName, epoch: int, restarts: int) -> ChildProcess:
        if self._is_elsewhere(name):
            return ChildProcess.start(self._launch(name, epoch, restarts), RAY_PROXY_COMMAND)
        if name.role != "api-server":
            return ChildProcess.start(self._launch(name, epoch, restarts), self.command)
        if self.acceptor is None:
            assert self.listener is not None, "a host without a listener has no API servers"
            launch = self._launch(name, epoch, restarts, listen_fd=self.listener.socket.fileno())
            return ChildProcess.start(launch, self.command)
        seat = self.acceptor.add_target(str(name))
        launch = self._launch(name, epoch, restarts, handover_fd=seat.giver.server_end)
        try:
            return ChildProcess.start(launch, self.command, seat.remove)
        except OSError:
            seat.remove()
            raise

    def _launch(
        self,
        name: ProcessName,
        epoch: int,
        restarts: int,
        *,
        listen_fd: int | None = None,
        handover_fd: int | None = None,
    ) -> Launch:
        return Launch(
            role=name.role,
            index=name.index,
            epoch=epoch,
            config=self.config,
            run_dir=self.run_dir,
            model_dir=self.model.model_dir,
            tokenizer_dir=self.model.tokenizer_dir,
            served_model_names=self.model.served_names,
            api_server_count=self.config.api_server_count,
            engine_count=self.config.data_parallel_size,
            coordinator=self.config.coordinator if self._is_elsewhere(name) else self._coordinator,
            local_ranks=[] if self.config.headless or self._on_cluster else list(self.config.ranks),
            incarnation=self.incarnation,
            traits=self.traits,
            cluster_key=self.cluster_key,
            supervisor_pid=os.getpid(),
            listen_fd=listen_fd,
            given=self.given,
            handover_fd=handover_fd,
            restarts=restarts,
        )

    def _announce(self, pids: Mapping[ProcessName, int], infos: Mapping[ProcessName, Info]) -> None:
        text = banner(
            self.config,
            address=None if self.listener is None else self.listener.address,
            served_model_names=self.model.served_names,
            model_dir=self.model.model_dir,
            supervisor_pid=os.getpid(),
            pids=pids,
            infos=infos,
        )
        with contextlib.suppress(OSError):  # nobody reads it
            sys.stderr.write(f"{text}\nready in {time.monotonic() - self.began:.1f} s\n")
            sys.stderr.flush()


def _local_api_server_count(config: ServeConfig) -> int:
    """How many of the API servers this host runs."""
    if config.headless:
        return 0
    return [config.host_of_server(index) for index in range(config.api_server_count)].count(HEAD)


def _check_without_servers(config: ServeConfig, origins: Origins) -> None:
    """Raises ConfigError for options of API servers that a host has not. With --headless those in files and
    variables, which hosts may share, are passed over."""
    if not config.headless:
        if "host" in origins:
            raise ConfigError(f"{origins['host']}: nothing listens here, {HEAD} is not in --api-server-hosts")
        return
    for option in options_of(type(config)):
        origin = origins.get(option.field)
        if option.group in _API_SERVER_GROUPS and origin is not None and origin.source == "command line":
            raise ConfigError(f"{option.flag}: a --headless host has no API server; give it to the head")


@contextlib.contextmanager
def _handlers_restored() -> Iterator[None]:
    """Leaves signal handlers as they were, whatever the block sets."""
    before = {signum: signal.getsignal(signum) for signum in (*_TERMINATION_SIGNALS, signal.SIGCHLD)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Signals that would end the process raise Interrupted in the block, so that what it owns is cleaned up.

    They do nothing after the block, while that goes on.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signum)

    def ignore(signum: int, frame: FrameType | None) -> None:
        pass

    handled = [
        signum for signum in _TERMINATION_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN
    ]  # nohup
    for signum in handled:
        signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum in handled:
            signal.signal(signum, ignore)
