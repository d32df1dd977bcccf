"""The gateway process: creates its parts, runs them, and shuts them down in order.

``penstock gateway`` runs it in the foreground. It listens for HTTP clients and, with ``--ext-proc-port``, for
Envoy. SIGINT or SIGTERM drains it, SIGTERM after ``--drain-grace``, which another signal ends; the next one
stops it immediately. A closed terminal drains it as SIGTERM does; any other SIGHUP does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from setproctitle import setproctitle

from penstock import __version__, logging_setup
from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.config.origins import Origins
from penstock.config.secret_files import warn_if_open_to_others
from penstock.distribution import pip_install
from penstock.exit_codes import EXIT_FAILED, EXIT_OK, StartupError
from penstock.gateway.app import GatewayApp
from penstock.gateway.relay.plain_events import PlainEvents
from penstock.gateway.relay.relay import Relay
from penstock.gateway.relay.request_record import RequestRecord
from penstock.gateway.relay.retry_policy import RetryPolicy
from penstock.gateway.requests.model_rewrites import ModelRewrites, parse_weight
from penstock.gateway.routing.endpoint_discovery import (
    EndpointsFile,
    host_and_port,
    resolve,
)
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.picker import SCORERS, Picker, PickerLimits
from penstock.gateway.telemetry.access_log import log_to_file
from penstock.gateway.telemetry.metrics import GatewayMetrics, MetricsOptions
from penstock.gateway.telemetry.request_recorder import RequestRecorder
from penstock.gateway.telemetry.spans import span_data
from penstock.gateway.upstream.exchange import port_of
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.http.access_keys import Keys
from penstock.http.api_key_file import load_api_keys
from penstock.http.server import HttpServer
from penstock.http.server_state import Limits
from penstock.http.sockets.connection_source import ListeningSocket
from penstock.http.sockets.listener import ListenSocket, listen
from penstock.metrics.gc_policy import GarbageCollector
from penstock.streaming.rows.flow_windows import FlowWindows
from penstock.streaming.rows.io_submit import make_burst_writer
from penstock.supervisor.service_manager import ServiceManager, ServiceState
from penstock.supervisor.signals import Terminal, handlers_restored
from penstock.supervisor.startup.file_limit import raise_file_limit
from penstock.telemetry.spans import BatchSpanExporter, make_span_exporter
from penstock.telemetry.trace_context import TracePropagator

if TYPE_CHECKING:
    from penstock.gateway.extproc.routed_requests import RoutedRequests
    from penstock.gateway.extproc.server import EnvoyServer

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.25
"""Interval of checks for time-outs, and so the most by which they are late."""
FILE_INTERVAL_S = 1.0
"""Interval of checks whether the endpoints file has changed."""
MAX_BACKLOG = 4 << 20
HELD_BODIES = 16
"""Bodies of the maximum size that the gateway may hold altogether: it keeps a body until its reply has ended,
for retries. Beyond it, requests whose bodies are large get 503."""


def serve(config: GatewayConfig, origins: Origins) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code. Raises ConfigError."""
    setproctitle("penstock: gateway")
    logging_setup.configure("gateway", config.log_level, config.log_format)
    try:
        return _serve(config, origins)
    except StartupError as error:
        log.error("%s", error)
        return EXIT_FAILED


def _serve(config: GatewayConfig, origins: Origins) -> int:
    raise_file_limit()
    config = load_api_keys(config, origins)
    if config.access_log_file is not None:
        log_to_file(config.access_log_file)
    endpoint_source = EndpointSource(config)
    weights = read_weights(config.scorers, config.ttft_slo)
    listener = listen(config.host, config.port)
    with listener.socket, handlers_restored():
        code: int = uvloop.run(_Gateway(config, endpoint_source, weights, listener).run())
    return code


def read_weights(text: str, ttft_slo_s: float | None) -> dict[str, float]:
    """Weights of ``--scorers`` (NAME=WEIGHT,…) by name. Raises ConfigError for an unknown name, a bad
    number, and when only one of ``--ttft-slo`` and the scorer ``slo`` is given."""
    weights: dict[str, float] = {}
    for pair in text.split(","):
        name, _, weight = pair.partition("=")
        if name not in SCORERS:
            raise ConfigError(f"--scorers {pair}: there is no scorer {name!r}, but {', '.join(SCORERS)}")
        if name in weights:
            raise ConfigError(f"--scorers {text}: {name} is given twice")
        weights[name] = parse_weight(weight, f"--scorers {pair}")
    if weights.get("slo") and ttft_slo_s is None:
        raise ConfigError("--scorers slo=…: the scorer slo needs --ttft-slo")
    if ttft_slo_s is not None and not weights.get("slo"):
        raise ConfigError(f"--ttft-slo {ttft_slo_s:g}: the scorer that uses it, slo, is not in --scorers")
    return weights


def make_external_processor(
    config: GatewayConfig,
    *,
    relay: Relay,
    recorder: RequestRecorder,
    rewrites: ModelRewrites,
    tracing: TracePropagator,
    is_ready: Callable[[], bool],
) -> tuple[RoutedRequests, EnvoyServer] | tuple[None, None]:
    """The external processor of ``--ext-proc-port``. Raises ConfigError when its libraries are missing."""
    certificate = read_certificate(config)
    if config.ext_proc_port is None:
        return None, None
    try:
        from penstock.gateway.extproc.server import EnvoyServer
    except ModuleNotFoundError as error:
        raise ConfigError(f"--ext-proc-port needs the package {error.name}: {pip_install('envoy')}") from None
    from penstock.gateway.extproc.routed_requests import RoutedRequests

    requests = RoutedRequests(
        relay=relay,
        recorder=recorder,
        rewrites=rewrites,
        keys=Keys(config.api_key or ()),
        tracing=tracing,
        session_header=config.session_header.lower().encode(),
        max_request_bytes=config.max_request_bytes,
        endpoint_api_key=config.endpoint_api_key,
    )
    return requests, EnvoyServer(requests, is_ready, certificate)


def read_certificate(config: GatewayConfig) -> tuple[bytes, bytes] | None:
    """Private key and certificate chain of the external processor. Raises ConfigError."""
    files = {"key": config.ext_proc_key_file, "cert": config.ext_proc_cert_file}
    if files["key"] is None and files["cert"] is None:
        return None
    read = []
    for name, path in files.items():
        if path is None:
            raise ConfigError(f"--ext-proc-{name}-file is missing: a certificate and its key come together")
        if config.ext_proc_port is None:
            raise ConfigError(f"--ext-proc-{name}-file {path}: there is no --ext-proc-port")
        try:
            read.append(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"--ext-proc-{name}-file {path}: {error.strerror}") from None
    warn_if_open_to_others("--ext-proc-key-file", str(files["key"]))
    return read[0], read[1]


class EndpointSource:
    """URLs of endpoints from ``--endpoints`` and ``--endpoints-file``."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError when neither is given, and for a URL with a bad port."""
        self._listed = list(config.endpoints or ())
        self._file = None if config.endpoints_file is None else EndpointsFile(config.endpoints_file)
        if not self._listed and self._file is None:
            raise ConfigError(
                "there are no endpoints: --endpoints http://127.0.0.1:8000, or --endpoints-file FILE"
            )
        for url in self._listed:
            try:
                port_of(url)
            except ValueError as error:
                raise ConfigError(f"--endpoints {url}: {error}") from None
        self.urls()

    def urls(self) -> list[str]:
        return [url.rstrip("/") for url in (*self._listed, *(self._file.urls() if self._file else ()))]


class _Gateway:
    """Everything that lives while the gateway serves."""

    def __init__(
        self,
        config: GatewayConfig,
        endpoint_source: EndpointSource,
        weights: dict[str, float],
        listener: ListenSocket,
    ) -> None:
        self._config = config
        self._endpoint_source = endpoint_source
        self._weights = weights
        self._listener = listener
        self._began = time.monotonic()
        self._service_manager = ServiceManager()
        self._terminal = Terminal()
        self._resolved = asyncio.Event()
        """Set once the first endpoints are known."""
        self._finished = asyncio.Event()
        """Set when the drain has finished, timed out, or was ended by a second signal."""
        self._routed_requests: RoutedRequests | None = None
        self._envoy: EnvoyServer | None = None
        self._spans: BatchSpanExporter[RequestRecord] | None = None
        self._collector = GarbageCollector()
        self._http: HttpServer
        self._app: GatewayApp
        self._relay: Relay
        self._metrics: GatewayMetrics

    async def run(self) -> int:
        config, loop = self._config, asyncio.get_running_loop()
        pool = self._assemble(loop)
        if self._envoy is not None and config.ext_proc_port is not None:
            await self._envoy.start(config.host, config.ext_proc_port)
        background = [
            asyncio.ensure_future(self._check_timeouts()),
            asyncio.ensure_future(self._watch_endpoints(pool)),
        ]
        if config.scrape_interval:
            background.append(asyncio.ensure_future(self._scrape(pool)))
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal, signum)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        self._collector.start()
        try:
            await self._http.run_to_the_end()
            await self._wait_for_envoy()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            if self._envoy is not None:
                await self._envoy.stop()
            if self._spans is not None:
                await loop.run_in_executor(None, self._spans.close)
            pool.close()
        return EXIT_OK

    def _assemble(self, loop: asyncio.AbstractEventLoop) -> EndpointPool:
        """Create the parts; nothing listens yet. Raises ConfigError when libraries are missing."""
        config = self._config
        windows, burst = FlowWindows(), make_burst_writer()
        timeouts = Timeouts(
            connect=config.connect_timeout,
            first_token=config.first_token_timeout,
            event=config.event_timeout,
            total=config.request_timeout,
        )
        pool = EndpointPool(
            timeouts,
            lambda endpoint: self._relay.forget(endpoint),
            config.endpoint_api_key,
            http2=config.upstream_http2,
        )
        picker = Picker(
            self._weights,
            limits=PickerLimits(config.saturated_waiting, config.saturated_kv_used, config.affinity_excess),
            choose=config.picker,
        )
        self._relay = Relay(
            pool=pool,
            picker=picker,
            retry_policy=RetryPolicy(pool, picker, config.max_attempts),
            timeouts=timeouts,
            clock=loop.time,
            plain_events=PlainEvents(burst, windows),
            include_usage=config.include_usage,
            ttft_slo_s=config.ttft_slo,
        )
        if config.otlp_endpoint is not None:
            self._spans = make_span_exporter(
                config.otlp_endpoint, span_data, service=config.otlp_service_name, scope="penstock.gateway"
            )
        counts = {} if self._spans is None else self._spans.counts
        tracing = TracePropagator(spans=self._spans is not None, ratio=config.otlp_sampling_ratio)
        rewrites = ModelRewrites(config.model_rewrite or ())
        options = MetricsOptions(config.metrics_compat, config.metrics_max_models, config.metrics_pool_name)
        self._metrics = metrics = GatewayMetrics(lambda: pool.endpoints, options, rewrites.pairs(), counts)
        recorder = RequestRecorder(metrics, config.access_log, self._spans)
        self._app = GatewayApp(
            config=config,
            relay=self._relay,
            metrics=metrics,
            recorder=recorder,
            rewrites=rewrites,
            tracing=tracing,
            collector=self._collector,
            clock=loop.time,
            burst=burst,
        )
        self._routed_requests, self._envoy = make_external_processor(
            config,
            relay=self._relay,
            recorder=recorder,
            rewrites=rewrites,
            tracing=tracing,
            is_ready=self._app.is_ready,
        )
        limits = Limits(
            header_timeout_s=config.header_timeout,
            keep_alive_timeout_s=config.keep_alive_timeout,
            max_connections=config.max_connections,
            max_header_bytes=config.max_header_bytes,
            max_backlog=MAX_BACKLOG,
            max_held_bytes=HELD_BODIES * config.max_request_bytes,
        )
        self._http = HttpServer(
            self._app,
            ListeningSocket(
                self._listener.socket,
                config.max_connections,
                descriptors_per_connection=2,  # one of them to a model server
            ),
            limits,
            on_refusal=self._app.refused,
            windows=windows,
        )
        return pool

    def _announce(self) -> None:
        self._log_start()
        if not (self._app.leaving or self._app.draining):
            self._service_manager.set_state(ServiceState.READY)

    def _log_start(self) -> None:
        assert not isinstance(self._listener.address, str), "it listens on no unix socket"
        host, port = self._listener.address
        count = len(self._relay.pool.endpoints)
        envoy = None if self._envoy is None else host_and_port(host, self._envoy.port)
        url = f"http://{host_and_port(host, port)}/v1"
        took = time.monotonic() - self._began
        if self._config.log_format == "json":
            facts = {"version": __version__, "model_servers": count, "URL": url, "seconds": round(took, 1)}
            logging_setup.log_event(log, "ready", facts | ({"Envoy": envoy} if envoy else {}), "ready")
            return
        sys.stderr.write(
            f"penstock {__version__}\n"
            f"  gateway to {count} model server{'s' if count != 1 else ''}\n"
            + (f"  Envoy      {envoy}\n" if envoy else "")
            + f"  URL        {url}\n"
            f"ready in {took:.1f} s\n"
        )
        sys.stderr.flush()

    # -- background

    async def _check_timeouts(self) -> None:
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self._relay.check_timeouts()
            self._service_manager.beat()
            if self._metrics.running:
                self._collector.on_busy()
            else:
                self._collector.on_idle()
            if self._app.draining:
                self._end_when_idle()
            if self._routed_requests is not None:
                self._routed_requests.expire()
                if self._app.draining and not self._routed_requests.is_busy:
                    self._finished.set()

    async def _scrape(self, pool: EndpointPool) -> None:
        await self._resolved.wait()
        await pool.scrape_loop(self._config.scrape_interval)

    async def _watch_endpoints(self, pool: EndpointPool) -> None:
        """Follow the endpoints file and the addresses of host names. The gateway is announced once it has the
        first ones; it listens before, as a name server may take seconds."""
        loop = asyncio.get_running_loop()
        urls = self._endpoint_source.urls()
        targets = await resolve(urls)
        pool.update(targets)
        self._resolved.set()
        self._announce()
        resolved_at = loop.time()
        while True:
            await asyncio.sleep(FILE_INTERVAL_S)
            latest = self._endpoint_source.urls()
            if latest != urls or loop.time() - resolved_at >= self._config.resolve_interval:
                urls, resolved_at = latest, loop.time()
                targets = await resolve(urls, targets)
                pool.update(targets)

    # -- the end

    def _on_signal(self, signum: int) -> None:
        """SIGTERM announces the drain if there is a grace; any signal drains, and the next one stops."""
        self._service_manager.set_state(ServiceState.STOPPING)
        grace_s = self._config.drain_grace
        if self._app.draining:
            self._stop()
        elif signum == signal.SIGTERM and grace_s > 0 and not self._app.leaving:
            log.info("SIGTERM: /ready answers 503 for %g s (--drain-grace), then draining", grace_s)
            self._app.leaving = True
            asyncio.get_running_loop().call_later(grace_s, self._drain)
        else:
            self._drain()

    def _on_hangup(self) -> None:
        """A terminal that is closed sends several SIGHUP, so none of them hurries a drain."""
        if not self._terminal.was_closed():
            log.warning("SIGHUP: ignored, for the gateway has nothing to replace")
        elif self._terminal.ends_process and not (self._app.leaving or self._app.draining):
            self._on_signal(signal.SIGTERM)

    def _drain(self) -> None:
        if self._app.draining:  # a signal has ended the grace
            return
        log.info("draining: %d requests are in flight", self._metrics.running)
        self._app.draining = True
        self._http.end_connections()
        self._end_when_idle()
        asyncio.get_running_loop().call_later(self._config.drain_timeout, self._stop)

    def _end_when_idle(self) -> None:
        """Close the listener when no request is left. Until then new connections are accepted and
        their requests answered with 503 and the code ``draining``."""
        if not self._app.in_flight:
            self._http.drain()

    def _stop(self) -> None:
        if stopped := self._relay.stop():
            log.warning("%d requests still run; they end with an error", stopped)
        self._finished.set()
        self._http.stop()

    async def _wait_for_envoy(self) -> None:
        """Wait until no stream of Envoy is open and the access log has reported all routed requests."""
        if self._routed_requests is not None and self._routed_requests.is_busy:
            await self._finished.wait()
