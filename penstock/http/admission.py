"""Errors for requests that the server refuses because it is full or unavailable, with Retry-After headers.

429 ``overloaded``: the queue is at --max-num-queued-reqs or --max-num-queued-tokens, or has its maximum
bytes; the client should retry on this server after the time that the reply gives. 503: the server shuts down
(``draining``), sleeps (``sleeping``), is paused (``paused``), has no engine (``no_engine``) or too many
connections (``too_many_connections``); a load balancer should retry on another server immediately. Nothing is
generated for a refused request. Until the server serves, clients get 503 ``loading``.

Readiness probes get the same errors, with fields that say how far the server is.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.http.errors import ApiError, encode_json
from penstock.http.request import HttpRequest
from penstock.wire.messages import OVERLOADED, PAUSED, SLEEPING, WEIGHTS

UNAVAILABLE_RETRY_MS = 1_000
"""Retry-After of 503 in milliseconds; how long the server stays unavailable is unknown."""

LOADING_RETRY_MS = 5_000
"""Retry-After of a 503 while the model loads, which takes seconds to minutes."""

OVERLOADED_RETRY_MS = 1_000
"""Retry-After of a 429 that no engine has estimated."""

BEGUN = (b"x-request-begun", b"true")
"""Header of a 503 whose request was running: whoever sends it again runs it twice. A prompt that breaks
engines breaks those of the next server as well."""


def unavailable(message: str, code: str, retry_ms: int = UNAVAILABLE_RETRY_MS) -> ApiError:
    return ApiError(503, message, code=code, headers=retry_headers(retry_ms))


def too_many_connections() -> ApiError:
    return unavailable("Too many connections to this server.", "too_many_connections")


async def send_readiness(
    request: HttpRequest,
    state: Mapping[str, object],
    error: ApiError | None,
) -> None:
    """The reply to ``/ready``: ``state`` with ``ready``, and with the ``error`` why the server is not."""
    if error is None:
        await request.reply_json(encode_json({"ready": True, **state}))
        return
    body = encode_json({"ready": False, **state, "error": error.fields()})
    await request.reply_json(body, error.status, error.headers)


_CLOSED = {
    SLEEPING: "The server sleeps until POST /wake_up.",
    PAUSED: "The server is paused until POST /resume.",
}


def no_engine(closed: str) -> ApiError:
    """No engine accepts streams; ``closed``: why, see
    :meth:`penstock.dispatch.engine_client.EngineClient.refusal`."""
    if closed in _CLOSED:
        return unavailable(_CLOSED[closed], closed)
    if closed == WEIGHTS:
        return unavailable("No engine has the desired weights yet.", "no_engine")
    return unavailable("No engine takes requests.", "no_engine")


def overloaded(message: str) -> ApiError:
    """The server is full; the client should retry here."""
    return ApiError(429, message, code=OVERLOADED, headers=retry_headers(OVERLOADED_RETRY_MS))


def retry_headers(milliseconds: int) -> list[tuple[bytes, bytes]]:
    """Retry-After in whole seconds, rounded up (RFC 9110 §10.2.3), and retry-after-ms, which OpenAI's clients
    prefer."""
    return [(b"retry-after", b"%d" % -(-milliseconds // 1000)), (b"retry-after-ms", b"%d" % milliseconds)]
