"""The application of an API server: routes, access checks, error replies, and the small endpoints."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock import __version__
from penstock.api.access_log import AccessLog
from penstock.api.exchange import Exchange, Handler
from penstock.api.generate import GenerationRoutes
from penstock.api.request_spans import RequestSpans
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
from penstock.config.serve import ServeConfig
from penstock.dispatch.engine_client import EngineClient
from penstock.generation.dialect import Dialect, TokenCounter
from penstock.generation.replies.stream_failure import stream_failed
from penstock.generation.request.schemas import MAX_REQUEST_ID
from penstock.http.access_keys import OPEN_PATHS, Keys, check_local
from penstock.http.admission import no_engine, send_readiness, unavailable
from penstock.http.asgi import (
    ClientGone,
    encode_json,
    request_header,
    send_empty,
    send_error,
    send_json,
)
from penstock.http.cors import Cors
from penstock.http.eager import in_task
from penstock.http.errors import ApiError, unknown_route
from penstock.http.sink import Receive, Scope, Send, Sink
from penstock.metrics.api_server_metrics import ApiServerMetrics
from penstock.metrics.gc_policy import GarbageCollector
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.stream import StreamError
from penstock.telemetry.trace_context import TracePropagator

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class App:
    """The application of one process. Routes are looked up by path and method; there are no patterns."""

    config: ServeConfig
    models: ModelRoutes
    dialects: Sequence[Dialect]
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
    tracing: TracePropagator | None = None
    """None: there are no spans, and traces are ignored."""
    spans: RequestSpans | None = None
    leaving: bool = False
    """Whether a shutdown has been announced: requests are still served, but ``/ready`` answers 503."""

    def __post_init__(self) -> None:
        self.set_keys(self.config.api_key or (), self.config.admin_api_key or ())
        self._cors = Cors(self.config)
        self._access_log = AccessLog(self.config.access_log)
        self._on_end = self._end_detached  # one bound method for all requests
        self._late_errors: set[asyncio.Task[None]] = set()
        """Tasks that send the errors of detached replies of which nothing was sent."""
        self._draw = random.Random().getrandbits
        self._dialects = {dialect.path: dialect for dialect in self.dialects}
        self._page = Page(self.config.root_path) if self.config.web_page else None
        self._page_paths = self._page.paths if self._page is not None else frozenset()
        self._routes = self._make_routes()

    def set_keys(self, keys: Iterable[str], admin_keys: Iterable[str]) -> None:
        """Requests need these keys from here on."""
        self._keys = Keys(keys, admin_keys)

    def _make_routes(self) -> dict[str, dict[str, Handler]]:
        """Handlers by path and method."""
        document = openapi_document(
            __version__,
            api_key=bool(self.config.api_key),
            admin_key=bool(self.config.admin_api_key),
            root_path=self.config.root_path,
            page=self.config.web_page,
        )
        operations = self.operations
        optional: dict[str, dict[str, Handler]] = {}
        if self.tokenizer_info is not None:
            optional["/tokenizer_info"] = {"GET": _fixed(self.tokenizer_info)}
        return {
            **{dialect.path: {"POST": self.generation.handler(dialect)} for dialect in self.dialects},
            "/v1/models": {"GET": self.models.list},
            **{each.path: {"POST": self.count_tokens.handler(each)} for each in self.token_counters},
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
            "/openapi.json": {"GET": _fixed(encode_json(document))},
            **{path: {"GET": self._show_page, "HEAD": self._show_page} for path in self._page_paths},
        }

    def refused(self, error: ApiError) -> None:
        """Count and log a request that the connection answered itself: without complete headers."""
        self.metrics.reject(error.status, error.code)
        self._access_log.refused(error.status, error.message)

    async def __call__(self, scope: Scope, receive: Receive, send: Send, sink: Sink) -> None:
        exchange = self._exchange(scope, receive, send, sink)
        try:
            await self._handler(exchange)(exchange)
        except ApiError as error:
            await self._send_error(exchange, error, probe=scope["path"] in OPEN_PATHS)
        except ClientGone:
            pass  # the access log has a line for it
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            self.metrics.rejected[500] += 1
            exchange.error = failure = ApiError(500, "The server failed to handle this request.")
            await send_error(exchange.send, failure, exchange.error_body(failure))
        finally:
            if not exchange.detached:
                self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        """The reply has ended."""
        self._access_log.write(exchange)
        if self.spans is not None:
            self.spans.end(exchange)

    async def _send_error(self, exchange: Exchange, error: ApiError, *, probe: bool = False) -> None:
        """Answer with an error. ``probe``: a health check, which is not counted as a refused request."""
        exchange.error = error
        if probe:
            self.metrics.rejected[error.status] += 1
        else:
            self.metrics.reject(error.status, error.code)
        await send_error(exchange.send, error, exchange.error_body(error))

    def _end_detached(self, exchange: Exchange, error: StreamError | None) -> None:
        """A detached reply has ended; ``error`` is still to be sent."""
        self.generation.on_request_end(exchange)
        if error is None:
            self._finish(exchange)
        else:
            late = asyncio.ensure_future(self._send_late_error(exchange, stream_failed(error)))
            self._late_errors.add(late)
            late.add_done_callback(self._late_errors.discard)

    async def _send_late_error(self, exchange: Exchange, error: ApiError) -> None:
        try:
            await self._send_error(exchange, error)
        finally:
            self._finish(exchange)

    def _exchange(self, scope: Scope, receive: Receive, send: Send, sink: Sink) -> Exchange:
        given = request_header(scope, b"x-request-id")
        request_id = given if given and len(given) <= MAX_REQUEST_ID else f"{self._draw(64):016x}"
        headers = self._cors.reply_headers(scope)
        if self.config.enable_request_id_headers:
            headers.append((b"x-request-id", request_id.encode("latin-1")))
        return Exchange(
            scope, receive, send, sink, request_id=request_id, headers=headers, on_end=self._on_end
        )

    def _handler(self, exchange: Exchange) -> Handler:
        """The handler of a request that may be answered. Raises ApiError."""
        scope, root = exchange.scope, self.config.root_path
        if root and scope["path"].startswith(f"{root}/"):  # a proxy may have removed it
            scope["path"] = scope["path"][len(root) :]
        path, method = scope["path"], scope["method"]
        exchange.dialect = self._dialects.get(path)
        if exchange.for_anthropic:
            exchange.headers = [*exchange.headers, (b"request-id", exchange.request_id.encode("latin-1"))]
        if self.tracing is not None and exchange.dialect is not None:
            exchange.trace = self.tracing.extract(scope["headers"])
        if method == "OPTIONS":
            preflight = self._cors.preflight(scope)
            if preflight is not None:
                exchange.headers = preflight
                return _send_empty
        if not self._keys.guards(path):
            check_local(
                path,
                scope,
                unix_socket=self.config.uds is not None,
                loopback=self.config.allow_loopback_admin,
            )
        elif path not in self._page_paths:  # the page asks for the key
            exchange.tenant = self._keys.check(path, scope)
        return self._route(path, method)

    def _route(self, path: str, method: str) -> Handler:
        methods = self._routes.get(path)
        if methods is None and path.startswith(MODEL_PREFIX):
            methods = {"GET": self.models.model}
        if methods is None and path.startswith(PREFIX):
            methods = self.responses.methods(path)
        if methods is None and path.startswith(admin.PREFIX):
            methods = self.engines.methods(path)
        if methods is None and path.startswith(adapters.PREFIX):
            methods = self.adapters.methods(path)
        if methods is None:
            raise unknown_route(path, self._routes.keys() - self._page_paths)
        handler = methods.get(method)
        if handler is None:
            allowed = " or ".join(sorted(methods))
            raise ApiError(
                405,
                f"{path} takes {allowed}, not {method}.",
                headers=[(b"allow", ", ".join(sorted(methods)).encode())],
            )
        return handler

    # -- small endpoints

    async def _show_page(self, exchange: Exchange) -> None:
        assert self._page is not None  # it has routes
        await self._page.answer(exchange.scope["path"], exchange.scope, exchange.send)

    async def _health(self, exchange: Exchange) -> None:
        """The process lives. An engine that is down is restarted; a restart of the server would lose more."""
        await send_json(exchange.send, b"{}")

    async def _ready(self, exchange: Exchange) -> None:
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
            sleeping = self.engine_client.sleeps()
            error = no_engine(sleeping=sleeping)
            state["phase"] = "sleeping" if sleeping else "waiting for an engine"
        await send_readiness(exchange.send, state, error)

    async def _load(self, exchange: Exchange) -> None:
        await send_json(exchange.send, encode_json({"server_load": len(self.streams)}))


async def _send_empty(exchange: Exchange) -> None:
    await send_empty(exchange.send)


def _fixed(body: bytes) -> Handler:
    """A route whose reply is always the same JSON."""

    async def handle(exchange: Exchange) -> None:
        await send_json(exchange.send, body)

    return handle
