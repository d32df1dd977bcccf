"""``penstock gateway``: the supervisor of the workers, which do all the work.

It owns the listening socket, restarts workers that die, replaces them on SIGHUP with the options as they are
then, and drains them at the end, as the supervisor of ``penstock serve`` does. It stands in front of one
worker, too: without it a gateway could neither be replaced nor come back after a crash.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
from setproctitle import setproctitle

from penstock import __version__, logging_setup
from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.config.origins import Origins
from penstock.config.watched_file import TextFiles
from penstock.exit_codes import EXIT_FAILED, StartupError, exit_code_of
from penstock.gateway.billing.billing_file import BillingFile
from penstock.gateway.check_options import check_options
from penstock.gateway.routing.endpoint_discovery import host_and_port
from penstock.gateway.workers.keeper import Keeper
from penstock.gateway.workers.letters import WorkerName
from penstock.gateway.workers.scoreboard import ScoreboardFile
from penstock.http.api_key_file import load_api_keys
from penstock.http.sockets.listener import ListenSocket, listen, reserve_port
from penstock.metrics.gc_policy import GarbageCollector
from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.child_process import ChildProcess
from penstock.supervisor.children.child_starter import ChildStarter
from penstock.supervisor.children.process_manager import ChildTimes, Fleet, ProcessManager
from penstock.supervisor.event_loop import StartupSigns, Supervisor
from penstock.supervisor.listening.acceptor import Acceptor
from penstock.supervisor.service_manager import ServiceManager
from penstock.supervisor.signals import Interrupted, handlers_restored, interruptible, signals_blocked
from penstock.supervisor.startup.file_limit import raise_file_limit
from penstock.supervisor.startup.progress_display import LogProgressDisplay
from penstock.supervisor.startup.run_directory import RunDirectory
from penstock.supervisor.startup.startup_status import StartupStatus
from penstock.wire.control import ApiKeys, GatewayLaunch, Info, SupervisorCommand

log = logging.getLogger(__name__)

_SEED = "PYTHONHASHSEED"
STARTUP_TIMEOUT_S = 120.0
"""Maximum time between two progress reports of a starting worker, which needs about half a second."""
FIXED_OPTIONS = (
    *("host", "port", "ext_proc_host", "ext_proc_port", "workers", "worker_hang_timeout"),
    *("drain_timeout", "drain_grace", "log_level", "log_format", "billing_file"),
    "budget_state_file",
)
"""Options of the supervisor itself: only a new start changes them."""
OPEN = "off, anybody who can connect may use the gateway"

ReadOptions = Callable[[], tuple[GatewayConfig, Origins]]


def serve(config: GatewayConfig, origins: Origins, read_again: ReadOptions) -> int:
    """Serve until a signal or a failure ends it; return the exit code, see :mod:`penstock.exit_codes`.

    Must be called in the main thread. ``read_again`` reads the options as they are now, for SIGHUP. Raises
    ConfigError.
    """
    began = time.monotonic()
    setproctitle("penstock: gateway")
    logging_setup.configure("gateway", config.log_level, config.log_format)
    service_manager = ServiceManager()
    try:
        with handlers_restored(), contextlib.ExitStack() as owned, interruptible():
            key_files = TextFiles()
            config = load_api_keys(config, origins, key_files)
            check_options(config)
            raise_file_limit()
            starter = owned.enter_context(_starter(config.workers))
            listener = listen(config.host, config.port)
            owned.enter_context(listener.socket)
            envoy_port = None
            if config.ext_proc_port is not None:
                envoy_port = owned.enter_context(
                    reserve_port(config.envoy_host, config.ext_proc_port, "--ext-proc-port")
                )
            with signals_blocked():  # it is removed whatever comes
                run_dir = owned.enter_context(RunDirectory(None, parents=("/dev/shm",))).path
            if config.billing_file is not None:
                owned.enter_context(BillingFile(config.billing_file))
            scoreboard = owned.enter_context(ScoreboardFile(run_dir))
            keeper = owned.enter_context(Keeper(budget_state_file=config.budget_state_file))
            acceptor = owned.enter_context(Acceptor(listener.socket)) if config.workers > 1 else None
            gateway = _Gateway(
                config=config,
                config_before=config,
                read_again=read_again,
                key_files=key_files,
                listener=listener,
                acceptor=acceptor,
                envoy_port=envoy_port,
                run_dir=run_dir,
                keeper=keeper,
                scoreboard=scoreboard,
                starter=starter,
                began=began,
            )
            return gateway.run(service_manager)
    except StartupError as error:
        log.error("%s", error)
        return EXIT_FAILED
    except Interrupted as interruption:
        log.info("%s: ended before anything was started", signal.Signals(interruption.signum).name)
        return exit_code_of(interruption.signum)


def _worker_environment() -> dict[str, str] | None:
    """The workers' environment. They tell each other hashes of prompts and sessions: Python's, which are the
    same in all processes with this seed, and foreseen by no client. None: this process has got a seed."""
    if os.environ.get(_SEED, "random") != "random":
        return None
    return {**os.environ, _SEED: str(random.SystemRandom().randrange(1, 1 << 32))}


def _starter(workers: int) -> ChildStarter:
    """A single worker with an environment of its own is not forked: a template starts no earlier than it."""
    environ = _worker_environment()
    preload = ["penstock.gateway.process"] if workers > 1 or environ is None else []
    return ChildStarter("penstock.gateway.worker_main", preload, environ=environ)


@dataclass(slots=True, kw_only=True)
class _Gateway:
    """Everything that is prepared before the workers start."""

    config: GatewayConfig
    """Options of workers that start from now on."""
    config_before: GatewayConfig
    """Before the latest SIGHUP."""
    read_again: ReadOptions
    key_files: TextFiles
    listener: ListenSocket
    acceptor: Acceptor | None
    """None for a single worker, which accepts connections itself."""
    envoy_port: int | None
    run_dir: str
    keeper: Keeper
    scoreboard: ScoreboardFile
    starter: ChildStarter
    began: float
    """time.monotonic() at the start of the command."""

    def run(self, service_manager: ServiceManager) -> int:
        config = self.config
        manager = ProcessManager(
            Fleet(gateways=config.workers),
            ChildTimes(
                startup_timeout=STARTUP_TIMEOUT_S,
                drain_timeout=config.drain_timeout,
                drain_grace=config.drain_grace,
                gateway_hang_timeout=config.worker_hang_timeout,
            ),
        )
        supervisor = Supervisor(
            manager,
            self._start,
            StartupSigns(LogProgressDisplay(), StartupStatus(0), service_manager, self._announce),
            collector=GarbageCollector(),
            acceptor_failure=None if self.acceptor is None else self.acceptor.failure,
            prepare_replacement=self._read_options,
            on_nothing_replaced=self._restore_options,
        )
        return supervisor.run()

    def _start(self, name: ProcessName, epoch: int, restarts: int) -> ChildProcess:
        ends = contextlib.ExitStack()
        try:
            slot = self.scoreboard.take_slot()
            ends.callback(self.scoreboard.free_slot, slot)
            with self.keeper.add_worker(WorkerName(name.index, epoch)) as keeper:
                launch = GatewayLaunch(
                    role="gateway",
                    index=name.index,
                    epoch=epoch,
                    config=replace(self.config, ext_proc_port=self.envoy_port),
                    run_dir=self.run_dir,
                    worker_count=self.config.workers,
                    keeper_fd=keeper.fileno(),
                    scoreboard_slot=slot,
                    restarts=restarts,
                )
                if self.acceptor is None:
                    launch = msgspec.structs.replace(launch, listen_fd=self.listener.socket.fileno())
                else:
                    target = self.acceptor.add_target(str(name))
                    ends.callback(target.remove)
                    launch = msgspec.structs.replace(launch, handover_fd=target.sender.server_end)
                return self.starter.start(launch, ends.close, pass_fds=[launch.keeper_fd])
        except OSError:
            ends.close()
            raise

    def _read_options(self) -> list[SupervisorCommand] | None:
        """SIGHUP: reads the options again, for the workers that replace the others. Those that run are told
        the keys. None if the options are bad."""
        try:
            config, origins = self.read_again()
            config = load_api_keys(config, origins, self.key_files)
            check_options(config)
            fixed = {name: getattr(self.config, name) for name in FIXED_OPTIONS}
            running = replace(config, **fixed)
        except (ConfigError, ValueError) as error:  # ValueError: the rest does not go with what is fixed
            log.error("SIGHUP: %s; the gateway goes on with the options that it has", error)
            return None
        for name, value in fixed.items():
            if getattr(config, name) != value:
                flag = f"--{name.replace('_', '-')}"
                log.warning("SIGHUP: %s stays %s until the gateway is started again", flag, value)
        self.config_before, self.config = self.config, running
        return [ApiKeys(api_key=config.api_key or [], admin_api_key=config.admin_api_key or [])]

    def _restore_options(self) -> None:
        """No worker could start with the options as they are now. The keys hold: those that run have them."""
        keys = {name: getattr(self.config, name) for name in ("api_key", "admin_api_key")}
        self.config = replace(self.config_before, **keys)

    def _announce(self, pids: Mapping[ProcessName, int], infos: Mapping[ProcessName, Info]) -> None:
        """All workers are ready: shows the banner."""
        assert not isinstance(self.listener.address, str), "it listens on no unix socket"
        host, port = self.listener.address
        count = max(int(info["model_servers"]) for info in infos.values())
        envoy = None
        if self.envoy_port is not None:
            envoy = host_and_port(self.config.ext_proc_host or host, self.envoy_port)
        scheme = "http" if self.config.ssl_certfile is None else "https"
        base = f"{scheme}://{host_and_port(host, port)}"
        needs_key = self.config.api_key or self.config.client_keys_file
        took = time.monotonic() - self.began
        if self.config.log_format == "json":
            facts = {
                "version": __version__,
                "model_servers": count,
                "workers": {str(name): pid for name, pid in pids.items()},
                "URL": f"{base}/v1",
                "seconds": round(took, 1),
            }
            logging_setup.log_event(log, "ready", facts | ({"Envoy": envoy} if envoy else {}), "ready")
            return
        workers = ", ".join(map(str, pids.values()))
        with contextlib.suppress(OSError):  # standard error is closed
            sys.stderr.write(
                f"penstock {__version__}\n"
                f"  gateway to {count} model server{'s' if count != 1 else ''}\n"
                f"  processes  supervisor {os.getpid()}, workers {workers}\n"
                + (f"  Envoy      {envoy}\n" if envoy else "")
                + f"  URL        {base}/v1\n"
                f"  metrics    {base}/metrics\n"
                f"  API key    {'required' if needs_key else OPEN}\n"
                f"ready in {took:.1f} s\n"
            )
            sys.stderr.flush()
