"""CORS headers and preflight replies (https://fetch.spec.whatwg.org, section 3.3)."""

from __future__ import annotations

from penstock.config.serve import ServeConfig
from penstock.http.errors import ApiError
from penstock.http.request import HttpRequest

Headers = list[tuple[bytes, bytes]]

MAX_AGE_S = 600
"""Seconds for which a browser may cache the reply to a preflight."""
READABLE = b"retry-after, retry-after-ms, warning, x-request-id"
"""Reply headers that scripts may read in addition to the default ones."""
EVERY = "*"


class Cors:
    """The CORS rules of one server. Without allowed origins, replies get no CORS headers."""

    def __init__(self, config: ServeConfig) -> None:
        self._origins = frozenset(config.allowed_origins or ())
        self._methods = _named(config.allowed_methods)
        self._headers = _named(config.allowed_headers)
        self._credentials = config.allow_credentials

    def reply_headers(self, request: HttpRequest) -> Headers:
        """Headers that let the requesting page read the reply."""
        if not self._origins:
            return []
        origin = request.header(b"origin")
        if origin is None or not self._allows(origin):
            return self._vary()
        return [*self._grant(origin), (b"access-control-expose-headers", READABLE)]

    def preflight(self, request: HttpRequest) -> Headers | None:
        """Headers of the reply to a preflight request; None if the request is not a preflight.

        Raises ApiError if the announced request is not allowed.
        """
        if request.method != "OPTIONS":
            return None
        method = request.header(b"access-control-request-method")
        origin = request.header(b"origin")
        if method is None or origin is None:
            return None
        if not self._allows(origin):
            raise _refusal("origin", origin, "--allowed-origins")
        if self._methods is not None and method.lower() not in self._methods:
            raise _refusal("method", method, "--allowed-methods")
        wanted = request.header(b"access-control-request-headers") or ""
        for name in filter(None, map(str.strip, wanted.split(","))):
            if self._headers is not None and name.lower() not in self._headers:
                raise _refusal("header", name, "--allowed-headers")
        answer = [
            *self._grant(origin),
            (b"access-control-allow-methods", method.encode("latin-1")),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
        ]
        if wanted:
            answer.append((b"access-control-allow-headers", wanted.encode("latin-1")))
        return answer

    def check_socket(self, request: HttpRequest) -> None:
        """Check who opens a WebSocket, which a browser lets every page do: a page of this server, or of an
        allowed origin. Other clients send no origin. Raises ApiError."""
        origin = request.header(b"origin")
        if origin is None or self._allows(origin):
            return
        if origin.partition("://")[2].lower() != (request.header(b"host") or "").lower():
            raise _refusal("origin", origin, "--allowed-origins")

    def _allows(self, origin: str) -> bool:
        return EVERY in self._origins or origin in self._origins

    def _grant(self, origin: str) -> Headers:
        shown = EVERY if EVERY in self._origins else origin
        headers = [(b"access-control-allow-origin", shown.encode("latin-1")), *self._vary()]
        if self._credentials:
            headers.append((b"access-control-allow-credentials", b"true"))
        return headers

    def _vary(self) -> Headers:
        """The header that tells caches whether the reply depends on the origin."""
        return [] if EVERY in self._origins else [(b"vary", b"origin")]


def _named(allowed: list[str] | None) -> frozenset[str] | None:
    """The values that an option allows, in lower case; None if all are allowed."""
    return None if allowed is None or EVERY in allowed else frozenset(map(str.lower, allowed))


def _refusal(what: str, value: str, option: str) -> ApiError:
    return ApiError(403, f"The {what} {value!r} is not allowed by this server's {option}.", code="cors")
