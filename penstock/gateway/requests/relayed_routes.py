"""The routes that are relayed: those that infer, and those that describe models.

All others are refused. Model servers have many routes that administer them (sleep, load weights, abort
requests, change settings), each release has new ones, and a server may have them below a root path as well.
Which endpoint such a request would reach is undefined, and the gateway's own key for its endpoints must not
grant them to clients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.gateway.requests.apis import VECTOR_APIS
from penstock.gateway.requests.gemini_path import COUNT, verb_route
from penstock.gateway.requests.request_body import GENERATION_PATHS
from penstock.http.errors import ApiError
from penstock.http.other_routes import nearest_routes, route_meant

_V1_FAMILIES = frozenset(
    {
        "audio",
        "batches",
        "chat",
        "classify",
        "completions",
        "conversations",
        "detokenize",
        "embeddings",
        "files",
        "images",
        "messages",
        "moderations",
        "pooling",
        "realtime",
        "rerank",
        "reranking",
        "responses",
        "score",
        "tokenize",
        "uploads",
        "vector_stores",
        "videos",
    }
)
"""APIs of OpenAI, Anthropic and Jina: ``/v1/NAME`` and what is below it."""
INFERENCE_ROUTES = VECTOR_APIS.keys() | frozenset(
    {
        "/completion",
        "/encode",
        "/generate",
        "/generate_stream",
        "/inference/v1/generate",
        "/infill",
        "/invocations",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/images/edits",
        "/v1/images/generations",
        "/v1/images/variations",
        "/v1/moderations",
        "/v1/videos",
    }
)
"""Routes of vectors, and further ones of vLLM, SGLang, llama.cpp and TGI that cost a server about what a
generation costs."""
_OTHER_ROUTES = frozenset(
    {COUNT, "/api/show", "/apply-template", "/chat_tokenize", "/detokenize", "/tokenize"}
)
_READ_ROUTES = frozenset(
    {
        "/",
        "/api/ps",
        "/api/tags",
        "/api/version",
        "/docs",
        "/get_model_info",
        "/health",
        "/health_generate",
        "/info",
        "/metrics",
        "/model_info",
        "/models",
        "/openapi.json",
        "/ping",
        "/ready",
        "/tokenizer_info",
        "/v1/health",
        "/v1/models",
        "/v1beta/models",
        "/version",
    }
)
"""Relayed only if they read: below some of them servers load and unload models. Health, metrics and version
are the gateway's own on its port, and the model server's behind Envoy."""
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_INFERRING = _READING | {"POST"}
"""Methods of inference. The bodies of others are not read: none may get around what a key is for."""


_UNCLEAR = re.compile(r"[%\\;?#\x00-\x1f\x7f]|/\.{1,2}(?:/|$)| (?:/|$)")
"""In a path that was decoded: what is encoded twice, leads upwards, or ends the path for some servers.
Servers differ in which route that is."""
_SLASHES = re.compile("/{2,}")


class RelayedRoutes:
    """The routes that are relayed: inference, and those that are ``allowed`` besides, as ``/path``, or
    ``/path/*`` for what is below it, with or without a method before it (``GET /path``).

    ``root_path``: prefix that model servers strip. Routes below it are those without it.
    """

    def __init__(self, allowed: Iterable[str] = (), root_path: str = "") -> None:
        self._root = f"{root_path}/"
        self._exact: set[tuple[str, str]] = set()
        self._below: list[tuple[str, str]] = []
        for each in allowed:
            method, _, path = each.rpartition(" ")
            if path.endswith("/*"):
                self._below.append((method, path.removesuffix("*")))
            else:
                self._exact.add((method, path.rstrip("/") or "/"))

    def route(self, path: str) -> str:
        """The route for which servers may take ``path``, which is decoded once: many of them drop empty
        segments, some do not care for case. So no spelling of a route escapes what is decided by its name."""
        if path in GENERATION_PATHS:
            return path
        if path.startswith("/"):
            path = f"{_SLASHES.sub('/', path).rstrip('/')}/"
            if self._root != "/" and path.startswith(self._root):
                path = path[len(self._root) - 1 :]
            path = path[:-1] or "/"
        if (verb := verb_route(path)) is not None and not _UNCLEAR.search(path):
            return verb
        lower = path.lower()
        return lower if lower in GENERATION_PATHS else path

    def check_route(self, method: str, route: str) -> None:
        """Refuse a request that no endpoint is to get. ``route`` is :meth:`route`'s. Raises ApiError."""
        if not self._is_relayed(method, route):
            meant = route_meant(route)
            if not meant and (near := nearest_routes(route, sorted(GENERATION_PATHS | VECTOR_APIS.keys()))):
                meant = f" Did you mean {' or '.join(near)}?"
            raise ApiError(
                403,
                f"The gateway does not relay {method} {route[:200]}.{meant} "
                "It relays only inference routes such as POST /v1/chat/completions, GET /v1/models, and "
                "those of --allow-route. Routes that administer or show one model server are for those who "
                "can reach it directly; those of the gateway itself, as /admin/endpoints/drain, need its "
                "--admin-api-key-file or --allow-loopback-admin. The gateway's own figures are at /metrics, "
                "and penstock status --url shows them.",
                code="administrative",
            )

    def target(self, method: str, route: str, target: bytes) -> bytes:
        """The ``target`` of a request for ``route``, as endpoints get it: without a slash at the end of its
        path, which some of them answer with a redirect. Whether it belongs to the name of a route that is
        ``allowed`` besides, the client knows."""
        path, mark, query = target.partition(b"?")
        if not path.endswith(b"/") or not self._is_known(method, route):
            return target
        return (path.rstrip(b"/") or b"/") + mark + query

    def allows(self, method: str, route: str) -> bool:
        """Whether the route is one of those that are ``allowed`` besides."""
        if (method, route) in self._exact or ("", route) in self._exact:
            return True
        return any(given in ("", method) and route.startswith(path) for given, path in self._below)

    def _is_relayed(self, method: str, route: str) -> bool:
        if self._is_known(method, route):
            return True
        return route.startswith("/") and not _UNCLEAR.search(route) and self.allows(method, route)

    @staticmethod
    def _is_known(method: str, route: str) -> bool:
        if route in GENERATION_PATHS or route in INFERENCE_ROUTES or route in _OTHER_ROUTES:
            return method in _INFERRING
        if route in _READ_ROUTES and (method in _READING or route == "/ping"):
            return True
        if not route.startswith("/") or _UNCLEAR.search(route):
            return False
        if method in _READING and route.startswith("/v1beta/models/"):
            return True
        _, root, family, *_ = f"{route}//".split("/", 3)
        if root != "v1" or method not in _INFERRING | {"DELETE"}:
            return False
        return family in _V1_FAMILIES or (family == "models" and method in _READING)
