"""``penstock serve``: checks the options, prepares what the processes share, runs them, cleans up."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from setproctitle import setproctitle

from penstock import logging_setup
from penstock.config.errors import ConfigError
from penstock.config.introspect import options_of
from penstock.config.options.hosts import HEAD
from penstock.config.origins import Origins
from penstock.config.secret_files import warn_if_open_to_others
from penstock.config.serve import ServeConfig
from penstock.config.watched_file import TextFiles
from penstock.engine.attach.launch.serve_command import attach_commands, engine_options
from penstock.exit_codes import EXIT_FAILED, StartupError, exit_code_of
from penstock.http.api_key_file import load_api_keys, reload_api_keys
from penstock.http.sockets.listener import ListenSocket, open_listener
from penstock.http.tls import server_context
from penstock.metrics.gc_policy import GarbageCollector
from penstock.supervisor.children import parent_death
from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.child_process import ChildProcess
from penstock.supervisor.children.child_starter import ChildStarter
from penstock.supervisor.children.desired_state_store import DesiredStateStore
from penstock.supervisor.children.process_manager import ChildTimes, Fleet, ProcessManager
from penstock.supervisor.event_loop import StartupSigns, Supervisor
from penstock.supervisor.listening.acceptor import Acceptor
from penstock.supervisor.listening.loading_server import LOADING_MODULES, LoadingServer
from penstock.supervisor.service_manager import ServiceManager
from penstock.supervisor.signals import (
    Interrupted,
    handlers_restored,
    interruptible,
    signals_blocked,
)
from penstock.supervisor.startup.adapters import start_adapters, states_at_start
from penstock.supervisor.startup.api_server_directories import ApiServerDirectories, api_server_directories
from penstock.supervisor.startup.banner import banner, banner_facts
from penstock.supervisor.startup.cluster import traits_of
from penstock.supervisor.startup.cluster_key import read_cluster_key
from penstock.supervisor.startup.file_limit import raise_file_limit
from penstock.supervisor.startup.media import Media, media_of
from penstock.supervisor.startup.model_resolution import (
    ResolvedModel,
    check_model_aliases,
    check_prompt_files,
    resolve_model,
)
from penstock.supervisor.startup.progress_display import make_progress_display
from penstock.supervisor.startup.run_directory import RunDirectory
from penstock.supervisor.startup.startup_status import SERVING, STARTING, StartupStatus
from penstock.supervisor.startup.synthetic_script import rendered_script
from penstock.telemetry.spans import check_tracing
from penstock.wire.control import ApiKeys, Info, Launch, SupervisorCommand
from penstock.wire.scripted import ScriptedRule
from penstock.wire.sockets import coordinator_address, new_incarnation
from penstock.wire.vllm.addresses import bind_address, split_address

log = logging.getLogger(__name__)

RAY_PROXY_COMMAND = parent_death.child_command("penstock.placement.process_proxy")
"""For processes on a Ray cluster. Started by name, not imported, because Ray may not be installed."""
CHILD_MODULE = "penstock.supervisor.children.child_main"
_API_SERVER_GROUPS = ("HTTP server", "CORS", "TLS", "Streaming")
_API_SERVER_FIELDS = ("lora_modules", "lora_dir")


def serve(
    config: ServeConfig, origins: Origins | None = None, *, child_command: Sequence[str] | None = None
) -> int:
    """Serve until a signal or a failure ends it; return the exit code, see :mod:`penstock.exit_codes`.

    Must be called in the main thread. ``origins`` says where values of ``config`` were set;
    ``child_command`` is the command that starts a child, for tests. Raises ConfigError for options that
    cannot be run, with nothing left behind.
    """
    started_at = time.monotonic()
    setproctitle("penstock: supervisor")
    logging_setup.configure("supervisor", config.log_level, config.log_format)
    for name, origin in (origins or {}).items():
        log.debug("%s is set by %s", name, origin)
    if config.attach is not None:
        _prepare_to_attach(config, origins or {})
    cluster_key = None if config.cluster_key_file is None else read_cluster_key(config.cluster_key_file)
    if config.otlp_endpoint is not None:
        check_tracing(config.otlp_endpoint)
    local_api_servers = _local_api_server_count(config)
    if not local_api_servers:
        _check_without_servers(config, origins or {})
    tls = None
    given_config, key_files = config, TextFiles()
    if not config.headless:
        config = load_api_keys(config, origins or {}, key_files)
        tls = server_context(config)  # API servers make their own; errors are reported here, once
        if config.ssl_keyfile is not None:
            warn_if_open_to_others("--ssl-keyfile", config.ssl_keyfile)
        elif config.ssl_certfile is not None:  # it holds the key, too
            warn_if_open_to_others("--ssl-certfile", config.ssl_certfile)
    service_manager = ServiceManager()
    status = StartupStatus(len(config.ranks), started_at)
    try:
        with handlers_restored(), contextlib.ExitStack() as owned, interruptible():
            raise_file_limit()
            starter = owned.enter_context(_starter(config, child_command))
            listener = loading_server = acceptor = None
            if local_api_servers:
                listener = owned.enter_context(open_listener(config, origins or {}))
                loading_server = owned.enter_context(LoadingServer(listener.socket, config, status, tls))
            with signals_blocked():  # it is removed whatever comes
                run_dir = owned.enter_context(RunDirectory(config.run_dir)).path
                directories = ApiServerDirectories()
                if local_api_servers:
                    directories = owned.enter_context(api_server_directories(config, run_dir))
            model = resolve_model(config, run_dir)
            adapters = start_adapters(config, model.served_names)
            if local_api_servers:
                check_prompt_files(config, model)
                check_model_aliases(config, model, adapters)
            script = rendered_script(config, model)
            media = owned.enter_context(media_of(config, model, local_api_servers))
            if listener is not None and local_api_servers > 1:
                acceptor = owned.enter_context(Acceptor(listener.socket))
            service = _Service(
                config=config,
                given_config=given_config,
                key_files=key_files,
                given=sorted(origins or {}),
                listener=listener,
                loading_server=loading_server,
                status=status,
                service_manager=service_manager,
                acceptor=acceptor,
                run_dir=run_dir,
                directories=directories,
                media=media,
                model=model,
                desired_states=states_at_start(adapters),
                script=script,
                cluster_key=cluster_key,
                traits={} if config.coordinator is None else traits_of(config, model),
                starter=starter,
                started_at=started_at,
            )
            return service.run()
    except StartupError as error:
        log.error("%s", error)
        return EXIT_FAILED
    except Interrupted as interruption:
        log.info("%s: ended before anything was started", signal.Signals(interruption.signum).name)
        return exit_code_of(interruption.signum)


def _starter(config: ServeConfig, command: Sequence[str] | None) -> ChildStarter:
    """For processes on this host. Engines of torch and vLLM start by their command: these libraries have
    threads, and a state that no fork survives."""
    preload = ["penstock.api.process"] if _local_api_server_count(config) else []
    if config.engine == "synthetic":
        preload += ["penstock.engine.loop.process", "penstock.engine.synthetic.engine"]
    if config.coordinator is None and config.api_server_count + config.data_parallel_size > 2:
        preload.append("penstock.coordinator.process")
    shared = LOADING_MODULES if _local_api_server_count(config) else ()
    return ChildStarter(CHILD_MODULE, preload, shared=shared, command=command)


@dataclass(slots=True, kw_only=True)
class _Service:
    """Everything that is prepared before the processes start."""

    config: ServeConfig
    """The options, with the keys as they were read last."""
    given_config: ServeConfig
    """The options without keys of files."""
    key_files: TextFiles
    given: list[str]
    """Fields of config that the operator has set."""
    listener: ListenSocket | None
    """None on a host without API servers."""
    loading_server: LoadingServer | None
    """Answers on the listener until the API servers do; None without a listener."""
    status: StartupStatus
    service_manager: ServiceManager
    acceptor: Acceptor | None
    """None for a single API server here, which accepts connections itself."""
    run_dir: str
    directories: ApiServerDirectories
    media: Media
    model: ResolvedModel
    desired_states: DesiredStateStore
    """Desired states of the fleet; the adapters of the start are settled."""
    script: list[ScriptedRule] | None
    """Rules of --synthetic-script."""
    cluster_key: str | None
    traits: dict[str, str]
    """Values that must be the same on all hosts."""
    starter: ChildStarter
    started_at: float
    """time.monotonic() at the start of the command."""
    incarnation: int = field(default_factory=new_incarnation)

    def run(self) -> int:
        manager = ProcessManager(
            Fleet(
                engines=len(self.config.ranks),
                first_rank=self.config.ranks.start,
                all_engines=self.config.data_parallel_size,
                api_servers=0 if self.config.headless else self.config.api_server_count,
                coordinator=self._coordinator is not None and not self.config.headless,
                media_workers=self.media.workers,
                expert_parallel=self.config.enable_expert_parallel,
                serves_with_one_engine=self.config.attach is not None,
            ),
            ChildTimes(
                startup_timeout=self.config.startup_timeout,
                drain_timeout=self.config.drain_timeout,
                drain_grace=self.config.drain_grace,
                engine_hang_timeout=self.config.engine_hang_timeout,
                api_server_hang_timeout=self.config.api_server_hang_timeout,
            ),
            self.desired_states,
        )
        collector = GarbageCollector(self.config.gc_policy)
        with contextlib.closing(make_progress_display(live=self.config.log_format == "text")) as display:
            supervisor = Supervisor(
                manager,
                self._start,
                StartupSigns(display, self.status, self.service_manager, self._announce),
                collector=collector,
                acceptor_failure=None if self.acceptor is None else self.acceptor.failure,
                prepare_replacement=self._read_keys,
            )
            self.status.set_phase(STARTING)
            return supervisor.run()

    def _read_keys(self) -> list[SupervisorCommand] | None:
        """SIGHUP: reads files with keys again, for the API servers that run and those that replace them; None
        if they are bad."""
        config = reload_api_keys(self.given_config, self.config, self.key_files)
        if config is None or config == self.config:
            return None if config is None else []
        self.config = config
        return [ApiKeys(api_key=config.api_key or [], admin_api_key=config.admin_api_key or [])]

    @property
    def _coordinator(self) -> str | None:
        """The coordinator's address for local children; None: one API server and one engine, both here, need
        none."""
        config = self.config
        if config.headless:
            return config.coordinator
        alone = config.api_server_count == config.data_parallel_size == 1 and config.coordinator is None
        alone = alone and config.attach is None  # it does the handshake
        return None if alone else coordinator_address(self.run_dir)

    @property
    def _on_ray(self) -> bool:
        return self.config.data_parallel_backend == "ray"

    def _is_remote(self, name: ProcessName) -> bool:
        """The process runs on a Ray cluster; its child here is a proxy."""
        if name.role == "api-server":
            return self.config.host_of_server(name.index) != HEAD
        return self._on_ray and name.role == "engine"

    def _start(self, name: ProcessName, epoch: int, restarts: int) -> ChildProcess:
        if self._is_remote(name):
            return ChildProcess.start(self._launch(name, epoch, restarts), RAY_PROXY_COMMAND)
        if name.role in ("engine", "media-worker") and self.config.engine != "synthetic":
            command = self.starter.command
            if name.role == "media-worker" and self.config.media_python is not None:
                command = parent_death.child_command(CHILD_MODULE, self.config.media_python)
            return ChildProcess.start(self._launch(name, epoch, restarts), command)
        if name.role != "api-server":
            return self.starter.start(self._launch(name, epoch, restarts))
        if self.acceptor is None:
            assert self.listener is not None, "a host without a listener has no API servers"
            launch = self._launch(name, epoch, restarts, listen_fd=self.listener.socket.fileno())
            return self.starter.start(launch)
        target = self.acceptor.add_target(str(name))
        launch = self._launch(name, epoch, restarts, handover_fd=target.sender.server_end)
        try:
            return self.starter.start(launch, target.remove)
        except OSError:
            target.remove()
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
        assert name.role != "gateway"
        media = Media() if self._is_remote(name) else self.media
        return Launch(
            role=name.role,
            index=name.index,
            epoch=epoch,
            config=self.config,
            run_dir=self.run_dir,
            model_dir=self.model.model_dir,
            draft_dir=self.model.draft_dir,
            tokenizer_dir=self.model.tokenizer_dir,
            served_model_names=self.model.served_names,
            api_server_count=self.config.api_server_count,
            engine_count=self.config.data_parallel_size,
            coordinator=self.config.coordinator if self._is_remote(name) else self._coordinator,
            local_ranks=[] if self.config.headless or self._on_ray else list(self.config.ranks),
            incarnation=self.incarnation,
            traits=self.traits,
            cluster_key=self.cluster_key,
            listen_fd=listen_fd,
            given=self.given,
            handover_fd=handover_fd,
            restarts=restarts,
            script=self.script if name.role == "engine" else None,
            response_store_dir=self.directories.responses,
            weights_dir=self.directories.weights,
            seal_key=self.directories.seal_key,
            media_dir=media.directory,
            media_workers=media.workers,
            media_capacity=media.capacity,
            media_arguments=self._media_arguments() if name.role == "media-worker" else [],
            desired=self.desired_states.settled(),
        )

    def _media_arguments(self) -> list[str]:
        if self.config.engine != "vllm":
            return []
        return [self.model.model_dir, *engine_options(self.config, self.given)]

    def _announce(self, pids: Mapping[ProcessName, int], infos: Mapping[ProcessName, Info]) -> None:
        """Everything has started: leaves clients to the API servers, and shows the banner."""
        if self.loading_server is not None:
            self.status.set_phase(SERVING)
            self.loading_server.hand_over()
        facts = banner_facts(
            self.config,
            address=None if self.listener is None else self.listener.address,
            served_model_names=self.model.served_names,
            model_dir=self.model.model_dir,
            supervisor_pid=os.getpid(),
            pids=pids,
            infos=infos,
        )
        seconds = time.monotonic() - self.started_at
        if self.config.log_format == "json":
            logging_setup.log_event(log, "ready", {**facts, "seconds": round(seconds, 1)}, "ready")
            return
        with contextlib.suppress(OSError):  # standard error is closed
            sys.stderr.write(f"{banner(facts)}\nready in {seconds:.1f} s\n")
            sys.stderr.flush()


def _prepare_to_attach(config: ServeConfig, origins: Origins) -> None:
    """Log how engines are started, and which options say nothing here. Raises ConfigError for options of
    other engines."""
    try:
        bind_address(str(config.attach))
    except OSError as error:
        raise ConfigError(f"--attach {config.attach}: {error.strerror}") from None
    if config.run_dir is None:
        log.info("without --run-dir, engines must be restarted when this server is")
    commands = attach_commands(config, str(config.model), sorted(origins))
    if split_address(str(config.attach))[1]:  # otherwise the coordinator tells the port
        for command in commands:
            log.info("engines start with: %s", command)


def _local_api_server_count(config: ServeConfig) -> int:
    """The number of API servers that run on this host."""
    if config.headless:
        return 0
    return [config.host_of_server(index) for index in range(config.api_server_count)].count(HEAD)


def _check_without_servers(config: ServeConfig, origins: Origins) -> None:
    """Raises ConfigError for options of API servers, on a host that runs none. With --headless only on the
    command line: files and environment variables may be shared with other hosts."""
    if not config.headless:
        if "host" in origins:
            raise ConfigError(f"{origins['host']}: nothing listens here, {HEAD} is not in --api-server-hosts")
        return
    for option in options_of(type(config)):
        origin = origins.get(option.field)
        of_servers = option.group in _API_SERVER_GROUPS or option.field in _API_SERVER_FIELDS
        if of_servers and origin is not None and origin.source == "command line":
            raise ConfigError(f"{option.flag}: a --headless host has no API server; give it to the head")
