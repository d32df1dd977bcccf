"""Requests that are refused for want of room or of an engine: with which status, and when to try again.

429 ``overloaded``: the queue is at --max-num-queued-reqs or --max-num-queued-tokens; the same server takes
the request a little later, and the engine that refused it says when. 503: the server cannot serve at all. It
shuts down (``draining``), sleeps (``sleeping``), has no engine (``no_engine``) or too many connections
(``too_many_connections``); a load balancer asks another one at once. Nothing is generated for a refused
request.
"""

from __future__ import annotations

from penstock.http.errors import ApiError
from penstock.streaming.stream import StreamError
from penstock.wire.messages import SLEEPING

UNAVAILABLE_RETRY_MS = 1_000
"""A server that cannot serve does not know for how long; its clients try again, or another one, soon."""


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers=_retry_headers(UNAVAILABLE_RETRY_MS))


def no_engine(*, sleeping: bool) -> ApiError:
    """No engine takes streams; ``sleeping``: because they were put to sleep."""
    if sleeping:
        return unavailable("The server sleeps until POST /wake_up.", SLEEPING)
    return unavailable("No engine takes requests.", "no_engine")


def stream_failed(error: StreamError) -> ApiError:
    """The HTTP error of a stream that failed before anything of it was sent."""
    retry_after_ms = error.retry_after_ms or (UNAVAILABLE_RETRY_MS if error.status == 503 else 0)
    headers = _retry_headers(retry_after_ms) if retry_after_ms else ()
    return ApiError(error.status, error.message, code=error.code, headers=headers)


def _retry_headers(milliseconds: int) -> list[tuple[bytes, bytes]]:
    """Retry-After has whole seconds (RFC 9110, 10.2.3), never too few; OpenAI's clients prefer the other."""
    return [(b"retry-after", b"%d" % -(-milliseconds // 1000)), (b"retry-after-ms", b"%d" % milliseconds)]
