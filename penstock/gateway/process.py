"""A worker of the gateway: creates its parts, runs them, and shuts them down in order.

The supervisor (:mod:`penstock.gateway.supervisor`) starts it with the listening socket or, if there
are several workers, with a socket over which it gets accepted connections. It owns the connections of clients
and to model servers. With --ext-proc-port it listens for Envoy as well. It takes connections after
AcceptConnections. After Drain it ends when its requests have ended; after Stop, or when the supervisor is
gone, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import uvloop

from penstock.config.errors import ConfigError
from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL, EXIT_OK
from penstock.gateway.assembly import GatewayParts, assemble
from penstock.gateway.discovery.endpoints_file import EndpointsDocument, EndpointSource
from penstock.gateway.requests.via import gateway_id
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint, ResolveSchedule, resolve
from penstock.gateway.scorer_weights import read_weights
from penstock.gateway.telemetry.access_log import log_to_file
from penstock.gateway.workers import shared_state
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.letters import WorkerName
from penstock.gateway.workers.scoreboard import Scoreboard
from penstock.http.server import STOP_S
from penstock.http.sockets.connection_source import ConnectionSource, HandedOverConnections, ListeningSocket
from penstock.http.tls import watch_files
from penstock.wire.channel import ControlChannel, SupervisorGone
from penstock.wire.control import (
    HEARTBEAT_INTERVAL_S,
    AcceptConnections,
    AnnounceDrain,
    ApiKeys,
    Drain,
    GatewayLaunch,
    Info,
    Stop,
)
from penstock.wire.handover import HandoverReceiver

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.25
"""Interval of checks for time-outs, and so the most by which they are late."""
FILE_INTERVAL_S = 1.0
"""Interval of checks whether the endpoints file has changed."""
ENVOY_LEAVES_S = 12.0
"""Time in which Envoy leaves a worker that was replaced: more than the age of its connections."""
RESOLVE_WAIT_S = 2.0
"""Longest wait for the first endpoints before clients are served: a name server may take longer."""
KUBERNETES_WAIT_S = 10.0
"""Seconds to wait where endpoints come from Kubernetes, and other workers serve clients meanwhile."""
CATCH_UP_WAIT_S = 5.0
"""Longest wait until endpoints have what was set before clients are served; later they are held."""
FIRST_MODELS_S = 1.0
"""Time for endpoints to list their models before clients are served. Slower ones may get requests for any
model at first."""


def run(control: ControlChannel) -> int:
    """The process's main function: serves until it is stopped. Returns the exit code."""
    try:
        code: int = uvloop.run(_Worker(control).serve())
    except ConfigError as error:
        fatal = not control.reported_ready and control.gateway_launch.epoch == 0
        control.failed(str(error), fatal=fatal, usage=True)
        return EXIT_FATAL if fatal else EXIT_FAILED
    return code


async def run_with(main: Coroutine[Any, Any, None], background: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run ``main`` to its end, then cancel ``background``. A background task never ends by itself: if one
    does, ``main`` is cancelled. Raises what either raises, and RuntimeError for a task that just ends."""
    running = asyncio.ensure_future(main)
    tasks = [asyncio.ensure_future(each) for each in background]
    try:
        done, _ = await asyncio.wait((running, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if running not in done:
            raise RuntimeError("a background task has ended")
    finally:
        for task in (running, *tasks):
            task.cancel()
        await asyncio.gather(running, *tasks, return_exceptions=True)


class _Worker:
    """Everything that lives while the worker serves. Raises ConfigError for options that cannot be run."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._launch: GatewayLaunch = control.gateway_launch
        self._config = self._launch.config
        if self._config.access_log_file is not None:
            log_to_file(self._config.access_log_file)
        self._endpoint_source = EndpointSource(self._config)
        self._weights = read_weights(self._config.scorers, self._config.ttft_slo)
        self._resolved = asyncio.Event()
        """Set once the first endpoints are known."""
        self._accepting = asyncio.Event()
        """Set when the supervisor leaves clients to this process, or ends it."""
        self._finished = asyncio.Event()
        """Set when the drain has finished, timed out, or was ended by a second signal."""
        self._retiring = False
        """Another worker has replaced this one: it serves the connections that it has."""
        self._beat_at = 0.0
        self._envoy_until = 0.0
        """Until when Envoy may have connections to a worker that was replaced."""
        self._parts: GatewayParts

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        launch = self._launch
        link = KeeperLink(
            socket.socket(fileno=launch.keeper_fd),
            WorkerName(launch.index, launch.epoch),
            gateway_id(launch.run_dir),
        )
        self._parts = parts = assemble(
            self._config,
            self._weights,
            self._endpoint_source.upstreams.default,
            self._connection_source(),
            loop.time,
            link,
            Scoreboard(link, launch.run_dir, launch.scoreboard_slot),
        )
        if parts.kubernetes is not None:
            await parts.kubernetes.connect()
        loop.add_reader(self._control.fileno(), self._on_command)
        await link.open()
        background = [self._check_timeouts(), self._watch_endpoints(), self._share(link)]
        background += [parts.catching_up.run(), parts.keys.follow(), *parts.exports.running()]
        if parts.kubernetes is not None:
            background.append(parts.kubernetes.run())
        if parts.caches is not None:
            background.append(parts.caches.run())
        if parts.certificates is not None:
            background.append(watch_files(parts.certificates))
        if (shares := parts.relay.router.admission.shared_shares) is not None:
            background.append(shares.run())
        if self._config.models_interval:
            background.append(self._learn_models())
        if self._config.scrape_interval:
            background.append(self._scrape())
        try:
            await run_with(self._serve_clients(), background)
        except BaseException:
            self._stop()  # clients get an error, not a broken connection
            await asyncio.sleep(STOP_S)
            raise
        finally:
            if parts.envoy is not None:
                await parts.envoy.stop()
            if parts.log_forwarding is not None:
                parts.log_forwarding.close()
            parts.exports.finish()
            await loop.run_in_executor(None, parts.exports.close)
            await parts.control.close()
            await parts.relay.router.close()
            if parts.caches is not None:
                parts.caches.close()
            parts.pool.close()
            parts.exposition.send()
            await link.close()
        return EXIT_OK

    def _connection_source(self) -> ConnectionSource:
        launch = self._launch
        if launch.handover_fd is not None:  # a connection has another one to a model server
            return HandedOverConnections(HandoverReceiver(launch.handover_fd), descriptors_per_connection=2)
        assert launch.listen_fd is not None
        listener = socket.socket(fileno=launch.listen_fd)
        return ListeningSocket(listener, self._config.max_connections, descriptors_per_connection=2)

    async def _serve_clients(self) -> None:
        parts, config = self._parts, self._config
        await self._wait_for_endpoints()
        await parts.catching_up.settle(CATCH_UP_WAIT_S)
        if parts.envoy is not None and config.ext_proc_port is not None:
            await parts.envoy.start(config.envoy_host, config.ext_proc_port)
        parts.collector.start()
        info: Info = {"model_servers": len(parts.pool.endpoints)}
        self._control.ready(info)
        await self._accepting.wait()
        await parts.http.run_to_the_end()
        if parts.routed_requests is not None and (self._retiring or parts.routed_requests.is_busy):
            await self._finished.wait()  # for Envoy's streams, and for what its access log reports

    async def _wait_for_endpoints(self) -> None:
        """Wait until the first endpoints are known, but not forever. Raises ConfigError: this process would
        replace one that knows the pods, of which the API server tells this one nothing."""
        launch, kubernetes = self._launch, self._parts.kubernetes
        first = launch.epoch == 0 and launch.index < launch.worker_count
        limit_s = RESOLVE_WAIT_S if first or kubernetes is None else KUBERNETES_WAIT_S
        try:
            async with asyncio.timeout(limit_s):
                await self._resolved.wait()
        except TimeoutError:
            if kubernetes is not None and not first and not launch.restarts:
                raise ConfigError(f"--kubernetes-pool: no pods are known after {limit_s:g} s") from None

    # -- background

    async def _check_timeouts(self) -> None:
        parts = self._parts
        while True:
            self._send_heartbeat()
            await asyncio.sleep(CHECK_INTERVAL_S)
            parts.relay.check_timeouts()
            parts.app.websockets.check()
            if parts.metrics.running:
                parts.collector.on_busy()
            else:
                parts.collector.on_idle()
            if parts.app.own_routes.draining:
                self._end_when_idle()
            if parts.routed_requests is not None:
                parts.routed_requests.expire()
                if parts.app.own_routes.draining and not parts.routed_requests.is_busy:
                    self._finished.set()
                left = self._retiring and time.monotonic() >= self._envoy_until
                if left and parts.routed_requests.may_leave:
                    self._finished.set()

    def _send_heartbeat(self) -> None:
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + HEARTBEAT_INTERVAL_S
            with contextlib.suppress(SupervisorGone):  # the reader of commands ends the process
                self._control.heartbeat()

    async def _share(self, link: KeeperLink) -> None:
        """Tell the other workers what helps them, and the keeper what this one counts."""
        while True:
            await asyncio.sleep(self._share_interval_s(link))
            self._parts.shared_state.share()
            self._parts.relay.router.admission.billing.note_sent()
            if self._parts.log_forwarding is not None:
                self._parts.log_forwarding.send()
            self._parts.exposition.send_when_due()

    def _share_interval_s(self, link: KeeperLink) -> float:
        if not link.siblings:
            return shared_state.ALONE_INTERVAL_S
        return shared_state.INTERVAL_S if self._parts.metrics.running else shared_state.IDLE_INTERVAL_S

    async def _scrape(self) -> None:
        await self._resolved.wait()
        await self._parts.pool.scrape_loop(self._config.scrape_interval)

    async def _learn_models(self) -> None:
        await self._resolved.wait()
        await self._parts.models.run()

    async def _watch_endpoints(self) -> None:
        """Follow the endpoints file, the addresses of host names, and Kubernetes."""
        loop, kubernetes = asyncio.get_running_loop(), self._parts.kubernetes
        news = asyncio.Event() if kubernetes is None else kubernetes.news
        document = self._endpoint_source.document()
        targets = await resolve(document.looked_up())
        schedule = ResolveSchedule(self._config.resolve_interval, loop.time())
        while True:
            news.clear()
            self._take_over(document, targets)
            if not self._resolved.is_set() and (kubernetes is None or kubernetes.synced):
                await self._parts.models.read_all(FIRST_MODELS_S)
                self._resolved.set()
            while not news.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), FILE_INTERVAL_S)
                latest = self._endpoint_source.document()
                changed, due = latest is not document, schedule.is_due(loop.time(), away=self._is_any_away())
                if changed or due:
                    document, before = latest, targets
                    targets = await resolve(document.looked_up(), before)
                    schedule.resolved(loop.time())
                    if changed or targets != before:
                        break

    def _is_any_away(self) -> bool:
        return any(
            each.is_away or not (each.breaker.closed or each.breaker.avoids)
            for each in self._parts.pool.endpoints
        )

    def _take_over(self, document: EndpointsDocument, targets: Sequence[ResolvedEndpoint]) -> None:
        """Endpoints, pools and routes of models hold from here on."""
        parts, kubernetes = self._parts, self._parts.kubernetes
        found, pools, routes = document.in_pools(targets), document.pools, document.routes
        found += document.hosted()
        if kubernetes is not None:
            found += kubernetes.endpoints_in(pools)
            pools = kubernetes.with_pools(pools)
            routes = kubernetes.with_routes(routes)
        parts.relay.router.admission.billing.pricing.update(document.currency, document.prices)
        parts.pool.update(document.reached(found))
        parts.models.directory.update(parts.pool.endpoints, pools, routes)
        parts.metrics.add_models(parts.models.directory.pairs())
        parts.metrics.set_pools(pool.name for pool in pools)

    # -- the end

    def _on_command(self) -> None:
        try:
            commands = self._control.receive()
        except SupervisorGone:
            log.error("the supervisor is gone: ending")
            raise SystemExit(EXIT_FAILED) from None
        for command in commands:
            match command:
                case AcceptConnections():
                    self._accepting.set()
                case AnnounceDrain():
                    self._parts.app.own_routes.leave()
                case ApiKeys():
                    self._parts.app.set_keys(command.api_key, command.admin_api_key)
                case Drain(replaced=True):
                    self._retire()
                case Drain():
                    self._drain()
                case Stop():
                    self._stop()

    def _retire(self) -> None:
        """Take no more connections; serve those there are until they end."""
        log.info("replaced; %d requests are in flight", self._parts.metrics.running)
        self._retiring = True
        self._parts.http.retire(lambda: not self._parts.app.is_busy)
        if self._parts.envoy is not None:
            self._envoy_until = time.monotonic() + ENVOY_LEAVES_S
            self._parts.envoy.retire()

    def _drain(self) -> None:
        log.info("draining: %d requests are in flight", self._parts.metrics.running)
        self._parts.app.own_routes.drain()
        self._parts.http.end_connections()
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        """Close the listener when no request is left. Until then new connections are accepted and
        their requests answered with 503 and the code ``draining``."""
        if not self._parts.app.is_busy:
            self._parts.http.drain()

    def _stop(self) -> None:
        if stopped := self._parts.relay.stop():
            log.warning("%d requests still run; they end with an error", stopped)
        self._finished.set()
        self._accepting.set()
        self._parts.http.stop()
