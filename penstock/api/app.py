"""The application of an API server: routes, access checks, error replies, and the small endpoints."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock import __version__
from penstock.api.access_log import AccessLog
from penstock.api.api_request import ApiRequest, Handler
from penstock.api.generate import GenerationRoutes
from penstock.api.pool import PoolingRoutes
from penstock.api.request_spans import EndedRequest, record_of
from penstock.api.response_socket import ResponseSockets
from penstock.api.route_patterns import RoutePatterns, asks_verb
from penstock.api.routes import adapters, admin
from penstock.api.routes.count_tokens import CountTokensRoutes
from penstock.api.routes.debug import gc_route
from penstock.api.routes.metrics_endpoint import MetricsEndpoint
from penstock.api.routes.models import MODEL_PREFIX, ModelRoutes
from penstock.api.routes.openapi import openapi_document
from penstock.api.routes.operations import OperationRoutes
from penstock.api.routes.page import Page
from penstock.api.routes.responses import PREFIX, ResponseRoutes
from penstock.api.routes.tokenize import TokenizeRoutes
from penstock.api.routes.weights import WeightRoutes
from penstock.config.serve import ServeConfig
from penstock.dispatch.engine_client import EngineClient
from penstock.generation.dialect import DescribingRoute, Dialect, TokenCounter
from penstock.generation.pooling.dialect import PoolingDialect
from penstock.generation.replies.stream_failure import stream_failed
from penstock.http.access_keys import OPEN_PATHS, Keys, check_local, is_administrative, with_query_key
from penstock.http.admission import no_engine, send_readiness, unavailable
from penstock.http.cors import Cors
from penstock.http.eager import in_task
from penstock.http.errors import ApiError, encode_json, wrong_method
from penstock.http.other_routes import unknown_route, without_slash
from penstock.http.request import MAX_REQUEST_ID, ClientGone, HttpRequest
from penstock.metrics.api_server_metrics import ApiServerMetrics
from penstock.metrics.gc_policy import GarbageCollector
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.stream import StreamError
from penstock.telemetry.spans import BatchSpanExporter
from penstock.telemetry.trace_context import TracePropagator
from penstock.wire.messages import PAUSED, SLEEPING

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class App:
    """The application of one process. Routes are looked up by path and method."""

    config: ServeConfig
    models: ModelRoutes
    dialects: Sequence[Dialect]
    pool: PoolingRoutes
    token_counters: Sequence[TokenCounter]
    count_tokens: CountTokensRoutes
    tokenize: TokenizeRoutes
    tokenizer_info: bytes | None
    """The body of /tokenizer_info; None: the route is off."""
    generation: GenerationRoutes
    engine_client: EngineClient
    streams: OutputProcessor
    metrics: ApiServerMetrics
    metrics_endpoint: MetricsEndpoint
    collector: GarbageCollector
    process_name: str
    responses: ResponseRoutes
    engines: admin.EngineRoutes
    adapters: adapters.AdapterRoutes
    operations: OperationRoutes
    weights: WeightRoutes
    tracing: TracePropagator | None = None
    """None: there are no spans, and traces are ignored."""
    spans: BatchSpanExporter[EndedRequest] | None = None
    leaving: bool = False
    """Whether a shutdown has been announced: requests are still served, but ``/ready`` answers 503."""

    def __post_init__(self) -> None:
        self.set_keys(self.config.api_key or (), self.config.admin_api_key or ())
        self._cors = Cors(self.config)
        self._sockets = ResponseSockets(self, self.config.max_request_bytes)
        self._access_log = AccessLog(self.config.access_log)
        self._on_end = self._end_detached  # one bound method for all requests
        self._late_errors: set[asyncio.Task[None]] = set()
        """Tasks that send the errors of detached replies of which nothing was sent."""
        self._draw = random.Random().getrandbits
        self._dialects: dict[str, Dialect | PoolingDialect] = {
            **{dialect.path: dialect for dialect in self.dialects},
            **{dialect.path: dialect for dialect in self.pool.dialects},
        }
        self._shapes: dict[str, DescribingRoute | TokenCounter] = {
            **{route.path: route for route in self.models.others},
            **{counter.path: counter for counter in self.token_counters},
        }
        """Of the errors of other routes."""
        self._recognizing = [dialect for dialect in self.dialects if dialect.recognizes_clients]
        self._page = Page(self.config.root_path) if self.config.web_page else None
        self._page_paths = self._page.paths if self._page is not None else frozenset()
        self._document: bytes | None = None
        """OpenAPI."""
        self._routes = self._make_routes()
        self._patterns = RoutePatterns(self._routes)

    def set_keys(self, keys: Iterable[str], admin_keys: Iterable[str]) -> None:
        """Requests need these keys from here on."""
        self._keys = Keys(keys, admin_keys)

    def _make_routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method."""
        operations = self.operations
        optional: dict[str, dict[str, Handler]] = {}
        if self.tokenizer_info is not None:
            optional["/tokenizer_info"] = {"GET": _fixed(self.tokenizer_info)}
        return {
            **{dialect.path: self._methods_of(dialect) for dialect in self.dialects},
            **{each.path: {"POST": self.pool.handler(each)} for each in self.pool.dialects},
            "/v1/models": {"GET": self.models.list},
            **{each.path: {"POST": self.count_tokens.handler(each)} for each in self.token_counters},
            **{each.path: {each.method: self.models.handler(each)} for each in self.models.others},
            "/tokenize": {"POST": self.tokenize.tokenize},
            "/detokenize": {"POST": self.tokenize.detokenize},
            **optional,
            "/health": {"GET": self._health, "HEAD": self._health},
            "/ready": {"GET": self._ready, "HEAD": self._ready},
            "/ping": {"GET": self._ready, "POST": self._ready, "HEAD": self._ready},
            "/load": {"GET": self._load},
            "/version": {"GET": _fixed(encode_json({"version": __version__}))},
            "/metrics": {"GET": in_task(self.metrics_endpoint.metrics)},
            "/status": {"GET": in_task(self.metrics_endpoint.status)},
            admin.LIST: {"GET": self.engines.list},
            adapters.LIST: {"GET": self.adapters.list, "POST": in_task(self.adapters.load)},
            "/v1/load_lora_adapter": {"POST": in_task(self.adapters.vllm_load)},
            "/v1/unload_lora_adapter": {"POST": in_task(self.adapters.vllm_unload)},
            "/debug/gc": {"GET": in_task(gc_route(self.process_name, self.collector, self.engine_client))},
            "/reset_prefix_cache": {"POST": in_task(operations.reset_prefix_cache)},
            "/start_profile": {"POST": in_task(operations.start_profile)},
            "/stop_profile": {"POST": in_task(operations.stop_profile)},
            "/sleep": {"POST": in_task(operations.sleep)},
            "/wake_up": {"POST": in_task(operations.wake_up)},
            "/is_sleeping": {"GET": operations.is_sleeping},
            "/flush_cache": {"POST": in_task(operations.reset_prefix_cache)},
            "/pause": {"POST": in_task(operations.pause)},
            "/resume": {"POST": in_task(operations.resume)},
            "/is_paused": {"GET": operations.is_paused},
            "/abort_requests": {"POST": in_task(operations.abort_requests)},
            "/init_weight_transfer": {"POST": in_task(self.weights.transfers.init)},
            "/init_weight_transfer_engine": {"POST": in_task(self.weights.join)},
            "/update_weights": {"POST": in_task(self.weights.update)},
            "/weight_version": {"GET": self.weights.version},
            "/weights_checksum": {"GET": in_task(self.weights.checksum)},
            "/openapi.json": {"GET": in_task(self._openapi)},
            **{path: {"GET": self._show_page, "HEAD": self._show_page} for path in self._page_paths},
        }

    async def _openapi(self, request: ApiRequest) -> None:
        """The document is made for the first that asks: it takes 0.1 s."""
        if self._document is None:
            self._document = await asyncio.to_thread(
                lambda config: encode_json(
                    openapi_document(
                        __version__,
                        api_key=bool(config.api_key),
                        admin_key=bool(config.admin_api_key),
                        root_path=config.root_path,
                        page=config.web_page,
                    )
                ),
                self.config,
            )
        await request.http.reply_json(self._document)

    def _methods_of(self, dialect: Dialect) -> dict[str, Handler]:
        if not self.models.info.generates:
            return {"POST": self._no_text}
        methods: dict[str, Handler] = {"POST": self.generation.handler(dialect)}
        if dialect.sockets:
            methods |= {"GET": self._open_socket, "CONNECT": self._open_socket}
        return methods

    async def _no_text(self, request: ApiRequest) -> None:
        routes = " and ".join(self.pool.main_routes)
        raise ApiError(
            400,
            f"The model {self.models.info.names[0]!r} makes vectors, scores or labels, and no text: ask "
            f"{routes}.",
            param="model",
            code="task_not_supported",
        )

    async def _open_socket(self, request: ApiRequest) -> None:
        self._cors.check_socket(request.http)
        await self._sockets.open(request)

    def refused(self, error: ApiError) -> None:
        """Count and log a request that the connection answered itself: without complete headers."""
        self.metrics.reject(error.status, error.code)
        self._access_log.refused(error.status, error.message)

    async def __call__(self, http: HttpRequest) -> None:
        request = self._request(http)
        try:
            await self._handler(request)(request)
        except ApiError as error:
            await self._send_error(request, error, probe=http.path in OPEN_PATHS)
        except ClientGone:
            pass  # the access log has a line for it
        except asyncio.CancelledError:  # by the HTTP server, which stops
            if http.status or http.disconnected:
                raise
            stopped = StreamError(503, "server_stopped", "The server was stopped.")
            await self._send_error(request, stream_failed(stopped))
        except Exception:
            log.exception("%s %s failed", http.method, http.path)
            self.metrics.rejected[500] += 1
            await request.reply_error(ApiError(500, "The server failed to handle this request."))
        finally:
            if not request.detached:
                self._finish(request)

    def _finish(self, request: ApiRequest) -> None:
        """The reply has ended."""
        self._access_log.write(request)
        if self.spans is not None and request.trace is not None and request.trace.sampled:
            self.spans.add(record_of(request))

    async def _send_error(self, request: ApiRequest, error: ApiError, *, probe: bool = False) -> None:
        """Answer with an error. ``probe``: a health check, which is not counted as a refused request."""
        if probe:
            self.metrics.rejected[error.status] += 1
        else:
            self.metrics.reject(error.status, error.code)
        await request.reply_error(error)

    def _end_detached(self, request: ApiRequest, error: StreamError | None) -> None:
        """A detached reply has ended; ``error`` is still to be sent."""
        self.generation.on_request_end(request)
        if error is None:
            self._finish(request)
        else:
            late = asyncio.ensure_future(self._send_late_error(request, stream_failed(error)))
            self._late_errors.add(late)
            late.add_done_callback(self._late_errors.discard)

    async def _send_late_error(self, request: ApiRequest, error: ApiError) -> None:
        try:
            await self._send_error(request, error)
        finally:
            self._finish(request)

    def _request(self, http: HttpRequest) -> ApiRequest:
        given = http.header(b"x-request-id")
        request_id = given if given and len(given) <= MAX_REQUEST_ID else f"{self._draw(64):016x}"
        http.reply_headers = self._cors.reply_headers(http)
        request = ApiRequest(http, request_id=request_id, on_end=self._on_end)
        if self.config.enable_request_id_headers:
            request.add_headers((b"x-request-id", request_id.encode("latin-1")))
        return request

    def _handler(self, request: ApiRequest) -> Handler:
        """The handler of a request that may be answered. Raises ApiError."""
        http, root = request.http, self.config.root_path
        if root and http.path.startswith(f"{root}/"):  # a proxy may have removed it
            http.path = http.path[len(root) :]
        path, method = http.path, http.method
        route = path
        request.dialect = request.error_shape = self._dialects.get(path)
        if request.dialect is None:
            if path.endswith("/") and path not in self._routes and not self.models.has_path(path):
                path = http.path = without_slash(path)  # before any check: it is the same route
            route = self._patterns.route_of(path)
            request.dialect = self._dialects.get(route)
            request.error_shape = request.dialect or self._shapes.get(route) or self._client_api(http)
        for dialect in self._recognizing:
            if dialect.recognizes(path, http.fields):
                request.add_headers(*dialect.reply_headers(request.request_id))
        if self.tracing is not None and request.dialect is not None:
            request.trace = self.tracing.extract(http.headers)
        if method == "OPTIONS":
            preflight = self._cors.preflight(http)
            if preflight is not None:
                http.reply_headers = preflight
                return _reply_empty
        if not self._keys.guards(path):
            check_local(
                http,
                unix_socket=self.config.uds is not None,
                loopback=self.config.allow_loopback_admin,
            )
        elif path not in self._page_paths:  # the page asks for the key
            request.tenant = self._keys.check(path, with_query_key(path, http.target, http.fields))
        return self._route(request, route)

    def _client_api(self, http: HttpRequest) -> Dialect | None:
        """The API whose client asks for a route that has none."""
        return next((each for each in self.dialects if each.recognizes(http.path, http.fields)), None)

    def _route(self, request: ApiRequest, path: str) -> Handler:
        method = request.http.method
        methods = self._routes.get(path)
        if methods is None and path.startswith(MODEL_PREFIX):
            methods = {"GET": self.models.model}
        if methods is None and path.startswith(PREFIX):
            methods = self.responses.methods(path)
        if methods is None and path.startswith(admin.PREFIX):
            methods = self.engines.methods(path)
        if methods is None and path.startswith(adapters.PREFIX):
            methods = self.adapters.methods(path)
        handler = None if methods is None else methods.get(method)
        if handler is not None:
            return handler
        if methods is None or (method == "POST" and asks_verb(request.http.path)):
            raise unknown_route(
                request.http.path,
                [route for route in self._routes if route not in self._page_paths],
                lambda route: not is_administrative(route),
                request.error_shape.path if request.error_shape is not None else "",
            )
        raise wrong_method(path, method, methods.keys() - {"CONNECT"})

    # -- small endpoints

    async def _show_page(self, request: ApiRequest) -> None:
        assert self._page is not None  # it has routes
        await self._page.answer(request.http)

    async def _health(self, request: ApiRequest) -> None:
        """The process lives. An engine that is down is restarted; a restart of the server would lose more."""
        await request.http.reply_json(b"{}")

    async def _ready(self, request: ApiRequest) -> None:
        engines = self.engine_client.engines
        state = {
            "phase": "serving",
            "engines_ready": sum(engine.accepts_streams for engine in engines),
            "engines": len(engines),
        }
        error = None
        if self.leaving or self.generation.draining:
            error = unavailable("The server is shutting down.", "draining")
            state["phase"] = "draining"
        elif not state["engines_ready"]:
            closed = self.engine_client.refusal()
            error = no_engine(closed)
            state["phase"] = closed if closed in (SLEEPING, PAUSED) else "waiting for an engine"
        await send_readiness(request.http, state, error)

    async def _load(self, request: ApiRequest) -> None:
        await request.http.reply_json(encode_json({"server_load": len(self.streams)}))


async def _reply_empty(request: ApiRequest) -> None:
    await request.http.reply(204, ())


def _fixed(body: bytes) -> Handler:
    """A route whose reply is always the same JSON."""

    async def handle(request: ApiRequest) -> None:
        await request.http.reply_json(body)

    return handle
