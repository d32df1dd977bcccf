"""The ASGI application of an API server: routes, access, and the small endpoints."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from urllib.parse import unquote

from penstock import __version__
from penstock.api import admin
from penstock.api.access_log import AccessLog
from penstock.api.debug import GarbageRoute
from penstock.api.exchange import EXCHANGE, Exchange
from penstock.api.generate import GenerationRoutes
from penstock.api.metrics_endpoint import MetricsEndpoint
from penstock.api.models import model_list
from penstock.api.openapi import docs_page, openapi_document
from penstock.api.operations import OperationRoutes
from penstock.api.tokenize import TokenizeRoutes
from penstock.config.options import ServeConfig
from penstock.dispatch.engine_client import EngineClient
from penstock.generation.dialect import Dialect
from penstock.generation.model_info import ModelInfo
from penstock.generation.request_schemas import MAX_REQUEST_ID
from penstock.http.access_keys import OPEN_PATHS, Keys, check_local
from penstock.http.admission import no_engine, stream_failed, unavailable
from penstock.http.asgi import ClientGone, encode_json, request_header, send_empty, send_error, send_json
from penstock.http.cors import Cors
from penstock.http.errors import ApiError, unknown_model
from penstock.http.sink import Handler, Receive, Scope, Send
from penstock.metrics.api_server_metrics import ApiServerMetrics
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.stream import StreamError

log = logging.getLogger(__name__)

_MODEL_PREFIX = "/v1/models/"


class App:
    """One process's application. Dispatch is a look-up of path and method: routes have no patterns."""

    def __init__(
        self,
        config: ServeConfig,
        model_info: ModelInfo,
        model_root: str,
        dialects: Sequence[Dialect],
        tokenize: TokenizeRoutes,
        generation: GenerationRoutes,
        engine_client: EngineClient,
        streams: OutputProcessor,
        metrics: ApiServerMetrics,
        metrics_endpoint: MetricsEndpoint,
        garbage: GarbageRoute,
        engines: admin.EngineRoutes,
        operations: OperationRoutes,
    ) -> None:
        self._config = config
        self._model_info = model_info
        self._dialects = {dialect.path: dialect for dialect in dialects}
        self._generation = generation
        self._engine_client = engine_client
        self._streams = streams
        self._metrics = metrics
        self._engines = engines
        self._keys = Keys(config.api_key or ())
        self._cors = Cors(config)
        self._access_log = AccessLog(config.access_log)
        self._on_end = self._end  # one object for all requests
        self._late_errors: set[asyncio.Task[None]] = set()
        """Tasks that send the errors of detached replies of which nothing was sent."""
        self._draw = random.Random().getrandbits
        self._models = model_list(model_info, model_root)
        self._openapi = encode_json(
            openapi_document(__version__, api_key=bool(config.api_key), root_path=config.root_path)
        )
        self._docs = docs_page()
        self._routes: dict[str, dict[str, Handler]] = {
            **{dialect.path: {"POST": generation.handler(dialect)} for dialect in dialects},
            "/v1/models": {"GET": self._list_models},
            "/tokenize": {"POST": tokenize.tokenize},
            "/detokenize": {"POST": tokenize.detokenize},
            "/health": {"GET": self._health, "HEAD": self._health},
            "/ready": {"GET": self._ready, "HEAD": self._ready},
            "/ping": {"GET": self._health, "POST": self._health, "HEAD": self._health},
            "/load": {"GET": self._load},
            "/version": {"GET": self._version},
            "/metrics": {"GET": metrics_endpoint.metrics},
            admin.LIST: {"GET": engines.list},
            "/debug/gc": {"GET": garbage},
            "/reset_prefix_cache": {"POST": operations.reset_prefix_cache},
            "/start_profile": {"POST": operations.start_profile},
            "/stop_profile": {"POST": operations.stop_profile},
            "/sleep": {"POST": operations.sleep},
            "/wake_up": {"POST": operations.wake_up},
            "/is_sleeping": {"GET": operations.is_sleeping},
            "/openapi.json": {"GET": self._document},
            "/docs": {"GET": self._docs_page},
        }

    def refused(self, error: ApiError) -> None:
        """A request was answered before it was whole, or instead of being read."""
        self._metrics.reject(error.status, error.code)
        self._access_log.refused(error.status, error.message)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"unsupported ASGI scope {scope['type']}")
        exchange = self._exchange(scope, send)
        try:
            await self._answer(scope, receive, exchange)
        except ApiError as error:
            await self._send_error(exchange, error, probe=scope["path"] in OPEN_PATHS)
        except ClientGone:
            pass  # the access log tells
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            self._metrics.rejected[500] += 1
            await send_error(
                exchange.send,
                ApiError(500, "The server failed to handle this request.", type="InternalServerError"),
            )
        finally:
            del scope[EXCHANGE]  # breaks a reference cycle
            if not exchange.detached:
                self._access_log.write(exchange)

    async def _send_error(self, exchange: Exchange, error: ApiError, *, probe: bool = False) -> None:
        """Answer with an error. A ``probe`` wants nothing that could be refused."""
        if probe:
            self._metrics.rejected[error.status] += 1
        else:
            self._metrics.reject(error.status, error.code)
        body = None if exchange.dialect is None else exchange.dialect.error_body(error)
        await send_error(exchange.send, error, body, close=error.status in (408, 413))

    def _end(self, exchange: Exchange, error: StreamError | None) -> None:
        """A detached reply has ended, long after the call for it."""
        self._generation.on_request_end()
        if error is None:
            self._access_log.write(exchange)
        else:
            late = asyncio.ensure_future(self._send_late_error(exchange, stream_failed(error)))
            self._late_errors.add(late)
            late.add_done_callback(self._late_errors.discard)

    async def _send_late_error(self, exchange: Exchange, error: ApiError) -> None:
        try:
            await self._send_error(exchange, error)
        finally:
            self._access_log.write(exchange)

    def _exchange(self, scope: Scope, send: Send) -> Exchange:
        given = request_header(scope, b"x-request-id")
        request_id = given if given and len(given) <= MAX_REQUEST_ID else f"{self._draw(64):016x}"
        headers = self._cors.reply_headers(scope)
        if self._config.enable_request_id_headers:
            headers.append((b"x-request-id", request_id.encode("latin-1")))
        return Exchange(scope, send, request_id, headers, self._on_end)

    async def _answer(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        root = self._config.root_path
        if root and scope["path"].startswith(f"{root}/"):  # a proxy may have taken it off
            scope["path"] = scope["path"][len(root) :]
        path, method = scope["path"], scope["method"]
        exchange.dialect = self._dialects.get(path)
        preflight = self._cors.preflight(scope)
        if preflight is not None:
            exchange.headers = preflight
            await send_empty(exchange.send)
            return
        self._keys.check(path, scope)
        if not self._config.api_key:
            check_local(path, scope, unix_socket=self._config.uds is not None)
        await self._handler(path, method)(scope, receive, exchange.send)

    def _handler(self, path: str, method: str) -> Handler:
        methods = self._routes.get(path)
        if methods is None and path.startswith(_MODEL_PREFIX):
            methods = {"GET": self._model}
        if methods is None and path.startswith(admin.PREFIX):
            methods = self._engines.methods(path)
        if methods is None:
            known = ", ".join(sorted(self._routes))
            raise ApiError(404, f"No route {path}. There are {known}.", type="NotFoundError")
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

    async def _list_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, encode_json(self._models))

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = unquote(scope["path"][len(_MODEL_PREFIX) :])
        for card in self._models["data"]:
            if card["id"] == name:
                await send_json(send, encode_json(card))
                return
        raise unknown_model(name, self._model_info.all_names)

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._engine_client.any_up():
            raise unavailable("No engine is ready.", "no_engine")
        await send_json(send, b"{}")

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._generation.draining:
            raise unavailable("The server is shutting down.", "draining")
        if not self._engine_client.accepts_streams():
            raise no_engine(sleeping=self._engine_client.sleeps())
        await send_json(send, b"{}")

    async def _load(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, encode_json({"server_load": len(self._streams)}))

    async def _version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, encode_json({"version": __version__}))

    async def _document(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._openapi)

    async def _docs_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._docs, kind=b"text/html; charset=utf-8")
