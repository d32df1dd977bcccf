"""Helpers for ASGI applications: read request bodies and headers, send JSON and error replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from penstock.http.errors import MALFORMED, ApiError
from penstock.http.sink import Receive, Scope, Send

JSON = b"application/json"

Result = TypeVar("Result")

encode_json = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed its connection before its reply was complete; no reply is sent."""


def first_headers(scope: Scope) -> Mapping[bytes, bytes]:
    """The request's headers by name, in lower case; of those with the same name the first one."""
    found: dict[bytes, bytes] | None = scope.get("first_headers")
    if found is None:
        found = scope["first_headers"] = dict(reversed(scope["headers"]))
    return found


def forget_headers(scope: Scope) -> None:
    """Free the memory of the request's headers, which nobody asks for any more."""
    scope["headers"] = ()
    scope.pop("first_headers", None)


def request_header(scope: Scope, name: bytes) -> str | None:
    """The first header called ``name`` (lower case), decoded as Latin-1; None when absent."""
    value = first_headers(scope).get(name)
    return None if value is None else value.decode("latin-1")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``; to be called once the whole body has been received. Raises ClientGone, and
    cancels it, if the client disconnects meanwhile."""
    running, gone = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientGone
        return running.result()
    finally:
        running.cancel()
        gone.cancel()


def read_body(scope: Scope, receive: Receive, limit: int) -> Coroutine[Any, Any, bytes]:
    """The whole body of a JSON request, to be awaited.

    Raises ApiError for another content type or more than ``limit`` bytes, ClientGone if the client
    disconnects.
    """
    check_coding(scope)
    for name, value in scope["headers"]:
        if name == b"content-type" and value != JSON and not _is_json(value):
            kind = value.decode("latin-1")
            raise ApiError(
                400,
                f"Content-Type must be application/json, not {kind!r}.",
                type=MALFORMED,
                param="Content-Type",
            )
    return read_any_body(scope, receive, limit, _too_large)


def check_coding(scope: Scope) -> None:
    """Check that a request's body is not compressed. Raises ApiError."""
    if b"content-encoding" not in first_headers(scope):
        return
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise ApiError(
                415,
                "The header Content-Encoding is not identity: this server does not uncompress bodies.",
                param="Content-Encoding",
                headers=[(b"accept-encoding", b"identity")],
            )


async def read_any_body(
    scope: Scope, receive: Receive, limit: int, too_large: Callable[[int], ApiError]
) -> bytes:
    """A request's whole body. Raises ``too_large(limit)`` beyond ``limit`` bytes, ClientGone when it ends
    early."""
    if int(first_headers(scope).get(b"content-length") or 0) > limit:
        raise too_large(limit)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        whole: bytes = message.get("body", b"")
        if len(whole) > limit:
            raise too_large(limit)
        return whole
    parts: list[bytes] = [message.get("body", b"")]
    size = len(parts[0])
    while message.get("more_body", False):
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large(limit)
    if message["type"] == "http.disconnect":
        raise ClientGone
    return b"".join(parts)


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == JSON or kind.endswith(b"+json")


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than the {limit} bytes allowed by --max-request-bytes.",
    )


async def send_json(
    send: Send,
    body: bytes,
    status: int = 200,
    headers: Sequence[tuple[bytes, bytes]] = (),
    kind: bytes = JSON,
) -> None:
    """Send a whole reply; ``kind``: its content type."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_empty(send: Send, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send status 204 without a body."""
    await send({"type": "http.response.start", "status": 204, "headers": [*headers]})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_error(send: Send, error: ApiError, body: bytes | None = None) -> None:
    """Send an error reply. ``body`` replaces OpenAI's shape of the error."""
    await send_json(send, error.body() if body is None else body, error.status, error.headers)
