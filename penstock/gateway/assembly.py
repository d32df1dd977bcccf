"""Creates the parts of a gateway from its options."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config.errors import ConfigError
from penstock.config.gateway import GatewayConfig
from penstock.gateway.admission.admission import Admission
from penstock.gateway.admission.budget_store import BudgetStore
from penstock.gateway.admission.budgets import Budgets
from penstock.gateway.admission.client_keys import ClientKeys
from penstock.gateway.admission.clients_file import clients_file
from penstock.gateway.admission.envoy_certificates import certificate_files
from penstock.gateway.admission.flow_control import FlowControl, FlowLimits
from penstock.gateway.admission.intake import Intake
from penstock.gateway.admission.shared_shares import SharedShares, ShareStore
from penstock.gateway.app import GatewayApp
from penstock.gateway.billing.billing import Billing
from penstock.gateway.billing.billing_file import journal_folder
from penstock.gateway.billing.request_journal import RequestJournal
from penstock.gateway.control.catching_up import CatchingUp
from penstock.gateway.control.control_routes import ControlRoutes
from penstock.gateway.control.dry_run import DryRun
from penstock.gateway.control.endpoint_routes import EndpointRoutes
from penstock.gateway.control.fan_out import FanOut
from penstock.gateway.disaggregation.disaggregated_prefill import DisaggregatedPrefill
from penstock.gateway.kv_events.event_ports import EventPorts
from penstock.gateway.kv_events.followed_caches import FollowedCaches
from penstock.gateway.metric_definitions import SPANS, Figure
from penstock.gateway.models.directory import ModelDirectory
from penstock.gateway.models.learner import ModelLearner
from penstock.gateway.models.model_figures import model_figures
from penstock.gateway.models.shadows import Shadows
from penstock.gateway.own_routes import OwnRoutes
from penstock.gateway.relay.plain_events import PlainEvents
from penstock.gateway.relay.relay import Relay
from penstock.gateway.relay.retry_policy import RetryPolicy
from penstock.gateway.requests.body_rest import BodyLimits
from penstock.gateway.requests.relayed_routes import RelayedRoutes
from penstock.gateway.requests.via import Via
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.endpoint_capacity import EndpointCapacity
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.picker import Picker
from penstock.gateway.routing.router import Router
from penstock.gateway.telemetry.metrics import ExpositionLimits, GatewayMetrics
from penstock.gateway.telemetry.request_recorder import RequestRecorder
from penstock.gateway.telemetry.spans import span_data
from penstock.gateway.upstream.upstream import Upstream
from penstock.gateway.workers.drained_endpoints import DrainedEndpoints
from penstock.gateway.workers.exposition import WorkerExposition
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.scoreboard import Scoreboard
from penstock.gateway.workers.shared_budgets import SharedBudgetStore
from penstock.gateway.workers.shared_controls import SharedControls
from penstock.gateway.workers.shared_state import SharedState
from penstock.http.http2.flow_windows import FlowWindows
from penstock.http.receive_budget import ReceiveBudget
from penstock.http.server import HttpServer
from penstock.http.server_state import Limits
from penstock.http.sockets.connection_source import ConnectionSource
from penstock.http.tls import ReplacedFiles, server_context, watched_certificate
from penstock.metrics.gc_policy import GarbageCollector
from penstock.streaming.rows.io_submit import make_burst_writer
from penstock.telemetry.exports import Exports
from penstock.telemetry.trace_context import TracePropagator

if TYPE_CHECKING:
    from penstock.gateway.discovery.kubernetes_discovery import KubernetesDiscovery
    from penstock.gateway.extproc.log_forwarding import LogForwarding
    from penstock.gateway.extproc.routed_requests import RoutedRequests
    from penstock.gateway.extproc.server import EnvoyServer

MAX_BACKLOG = 4 << 20
HELD_BODIES = 16
"""Bodies of the maximum size that the gateway may hold altogether: it keeps a body until its reply has ended,
for retries. Beyond it, requests whose bodies are large get 503."""


@dataclass(slots=True)
class GatewayParts:
    """Everything that a gateway process runs."""

    pool: EndpointPool
    models: ModelLearner
    relay: Relay
    metrics: GatewayMetrics
    collector: GarbageCollector
    app: GatewayApp
    http: HttpServer
    exposition: WorkerExposition
    shared_state: SharedState
    keys: ClientKeys
    control: ControlRoutes
    catching_up: CatchingUp
    caches: FollowedCaches | None
    """None: endpoints publish no KV cache events."""
    exports: Exports[RequestRecord]
    routed_requests: RoutedRequests | None
    envoy: EnvoyServer | None
    log_forwarding: LogForwarding | None
    """None: there is no external processor."""
    kubernetes: KubernetesDiscovery | None
    """None: endpoints do not come from Kubernetes."""
    certificates: ReplacedFiles[None] | None
    """None: the listener's certificate stays as it is."""


def assemble(
    config: GatewayConfig,
    weights: dict[str, float],
    upstream: Upstream,
    source: ConnectionSource,
    clock: Callable[[], float],
    link: KeeperLink,
    scoreboard: Scoreboard,
) -> GatewayParts:
    """Create the parts; nothing listens yet. ``weights`` are those of ``--scorers``; ``upstream`` says how
    endpoints are reached of which nothing else is said; ``source`` gives
    connections; ``clock`` is the event loop's, in seconds; ``link`` and ``scoreboard`` lead to the other
    workers. The options have passed :func:`~penstock.gateway.check_options.check_options`."""
    windows, burst, collector = FlowWindows(), make_burst_writer(), GarbageCollector()
    admission = make_admission(config, clock, link, scoreboard)
    pool = EndpointPool(upstream, lambda endpoint: router.forget(endpoint), config.root_path)
    directory = ModelDirectory(config.unknown_models)
    shadows = Shadows(pool, directory, Picker(weights), clock)
    models = ModelLearner(pool, directory, clock, interval_s=config.models_interval, shadows=shadows)
    capacity = EndpointCapacity(
        config.max_requests_per_endpoint,
        scraping=config.scrape_interval > 0,
        elsewhere=scoreboard.in_flight_elsewhere,
    )
    picker = Picker(weights)
    router = Router(pool, models, picker, clock, admission, config.ttft_slo, capacity)
    plain_events, retry_policy = PlainEvents(burst, windows), RetryPolicy(router)
    relay = Relay(router, retry_policy, upstream.timeouts, plain_events, config.include_usage)
    router.caches = caches = _follow_caches(config, router)
    router.prefill = prefill = DisaggregatedPrefill(
        pool,
        picker,
        clock,
        timeout_s=min(config.first_token_timeout, config.request_timeout),
        caches=caches,
    )
    pool.on_updated.append(prefill.follow)
    options = ExpositionLimits(config.metrics_compat, pool=name_of_pool(config))
    kubernetes = make_kubernetes_discovery(config)
    metrics = GatewayMetrics(lambda: pool.endpoints, options, directory.listed_name)
    metrics.sources += [admission.figures, prefill.figures, shadows.figures]
    metrics.sources.append(lambda: model_figures(directory, metrics.in_flight))
    metrics.sources += [each.figures for each in (caches, kubernetes) if each is not None]
    exports = Exports(config, span_data, metrics.points, scope="penstock.gateway", instance=link.instance)
    metrics.sources.append(lambda: _span_figures(exports))
    recorder = RequestRecorder(
        metrics, config.access_log, exports.spans, config.log_content, admission.billing
    )
    tracing = TracePropagator(spans=exports.spans is not None, ratio=config.otlp_sampling_ratio)
    intake = Intake(
        _make_keys(config),
        RelayedRoutes(config.allow_route or (), config.root_path),
        session_header=config.session_header.lower().encode(),
        bodies=BodyLimits(config.max_request_bytes, config.max_relayed_bytes),
        priorities={} if kubernetes is None else kubernetes.priorities,
        relays_kv_transfer=config.allow_kv_transfer_params,
    )
    exposition = WorkerExposition(link, metrics)
    control, catching_up = _make_control(router, directory, intake, link, scoreboard)
    app = GatewayApp(
        own_routes=OwnRoutes(
            intake.keys,
            pool,
            collector,
            clock,
            exposition.text,
            control,
            loopback_administers=config.allow_loopback_admin,
        ),
        intake=intake,
        relay=relay,
        metrics=metrics,
        recorder=recorder,
        tracing=tracing,
        burst=burst,
        via=Via(f"penstock-{link.gateway}"),
    )
    routed_requests, envoy, log_forwarding = make_external_processor(
        config,
        link,
        relay=relay,
        recorder=recorder,
        intake=intake,
        tracing=tracing,
        is_ready=app.own_routes.is_ready,
    )
    tls = server_context(config)
    return GatewayParts(
        pool=pool,
        models=models,
        relay=relay,
        metrics=metrics,
        collector=collector,
        app=app,
        exposition=exposition,
        keys=intake.keys,
        control=control,
        catching_up=catching_up,
        shared_state=SharedState(link, scoreboard, router, clock, config.scrape_interval),
        http=_make_http_server(config, app, source, windows, tls),
        caches=caches,
        exports=exports,
        routed_requests=routed_requests,
        envoy=envoy,
        log_forwarding=log_forwarding,
        kubernetes=kubernetes,
        certificates=watched_certificate(tls, config),
    )


def _span_figures(exports: Exports[RequestRecord]) -> list[Figure]:
    return [Figure(SPANS, count, {"state": state}) for state, count in (exports.span_counts or {}).items()]


def _make_keys(config: GatewayConfig) -> ClientKeys:
    file = None if config.client_keys_file is None else clients_file(config.client_keys_file)
    return ClientKeys(config.api_key or (), file, admin_keys=config.admin_api_key or ())


def _make_control(
    router: Router,
    directory: ModelDirectory,
    intake: Intake,
    link: KeeperLink,
    scoreboard: Scoreboard,
) -> tuple[ControlRoutes, CatchingUp]:
    pool = router.pool
    controls, fan_out, drained = SharedControls(link), FanOut(pool), DrainedEndpoints(link)
    pool.on_updated.append(drained.follow)
    endpoint_routes = EndpointRoutes(pool, drained, scoreboard.in_flight_elsewhere)
    dry_run = DryRun(router, directory, intake)
    routes = ControlRoutes(pool, directory, fan_out, controls, endpoint_routes, dry_run)
    catching_up = CatchingUp(controls, fan_out, routes.is_meant, router.clock)
    pool.on_updated.append(catching_up.follow)
    return routes, catching_up


def _follow_caches(config: GatewayConfig, router: Router) -> FollowedCaches | None:
    if not config.kv_events:
        return None
    caches = FollowedCaches(EventPorts(config.kv_events, config.kv_events_ranks), router.pool, router.clock)
    router.pool.on_updated.append(caches.follow)
    return caches


def make_admission(
    config: GatewayConfig,
    clock: Callable[[], float],
    link: KeeperLink,
    scoreboard: Scoreboard,
) -> Admission:
    """Flow control and budgets."""
    flow, header = None, config.fairness_header
    if config.flow_control:
        limits = FlowLimits(
            config.max_queued_requests, timeout_s=config.queue_timeout, share=1.0 / config.workers
        )
        flow = FlowControl(limits, clock, scoreboard)
        scoreboard.on_wake = flow.fill_places
    store = _make_budget_store(config, link)
    budgets = Budgets(store, clock, config.budget_store_outage, share=1.0 / config.workers)
    name = None if header is None else header.lower().encode()
    billing = Billing(journal=_make_journal(config, clock))
    admission = Admission(budgets, flow, name, config.request_timeout, billing)
    if flow is not None and isinstance(store, ShareStore):
        admission.shared_shares = SharedShares(flow.shares, store)
    return admission


def _make_journal(config: GatewayConfig, clock: Callable[[], float]) -> RequestJournal | None:
    """Raises ConfigError."""
    if config.billing_file is None:
        return None
    try:
        return RequestJournal(journal_folder(config.billing_file), clock)
    except OSError as error:
        raise ConfigError(f"--billing-file {config.billing_file}: {error.strerror}") from None


def _make_budget_store(config: GatewayConfig, link: KeeperLink) -> BudgetStore:
    if config.budget_store == "memory":
        return SharedBudgetStore(link)
    from penstock.gateway.admission.redis_budget_store import BudgetClient, RedisBudgetStore

    return RedisBudgetStore(
        config.budget_store,
        timeout_s=config.budget_store_timeout,
        longest_request_s=config.queue_timeout + config.request_timeout,
        place=BudgetClient(link.gateway, str(link.own), lambda: link.first_epochs),
    )


def _make_http_server(
    config: GatewayConfig,
    app: GatewayApp,
    source: ConnectionSource,
    windows: FlowWindows,
    tls: ssl.SSLContext | None,
) -> HttpServer:
    limits = Limits(
        header_timeout_s=config.header_timeout,
        keep_alive_timeout_s=config.keep_alive_timeout,
        max_connections=config.max_connections,
        max_header_bytes=config.max_header_bytes,
        max_backlog=MAX_BACKLOG,
        max_held_bytes=HELD_BODIES * config.max_request_bytes,
    )
    return HttpServer(app, source, limits, tls=tls, on_refusal=app.refused, windows=windows)


def make_external_processor(
    config: GatewayConfig,
    link: KeeperLink,
    *,
    relay: Relay,
    recorder: RequestRecorder,
    intake: Intake,
    tracing: TracePropagator,
    is_ready: Callable[[], bool],
) -> tuple[RoutedRequests, EnvoyServer, LogForwarding] | tuple[None, None, None]:
    """The external processor of ``--ext-proc-port``."""
    if config.ext_proc_port is None:
        return None, None, None
    from penstock.gateway.extproc.log_forwarding import LogForwarding
    from penstock.gateway.extproc.routed_requests import RoutedRequests
    from penstock.gateway.extproc.server import EnvoyServer

    requests = RoutedRequests(
        relay=relay,
        recorder=recorder,
        intake=intake,
        tracing=tracing,
        budget=ReceiveBudget(HELD_BODIES * config.max_request_bytes),
    )
    forwarding = LogForwarding(link, requests)
    return requests, EnvoyServer(requests, is_ready, certificate_files(config)), forwarding


def name_of_pool(config: GatewayConfig) -> str:
    """Name of the endpoints' pool in metrics."""
    pools = config.kubernetes_pool or ()
    return pools[0].rpartition("/")[2] if len(pools) == 1 else "penstock"


def make_kubernetes_discovery(config: GatewayConfig) -> KubernetesDiscovery | None:
    """What follows ``--kubernetes-pool``."""
    if not config.kubernetes_pool:
        return None
    from penstock.gateway.discovery.kubernetes_discovery import KubernetesDiscovery

    return KubernetesDiscovery(
        config.kubernetes_config,
        config.kubernetes_pool,
        has_keys=bool(config.api_key or config.client_keys_file),
    )
