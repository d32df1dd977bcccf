"""Sends one request to many servers at once, and reads what each says of its engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.upstream.exchange import Headers, UpstreamError, UpstreamRequest
from penstock.gateway.upstream.fetch import BrokenReplyError, TooLargeError, fetch

MAX_CALLS = 64
"""Servers that are asked at the same time, by all calls of this worker."""
MAX_REPLY_BYTES = 256 << 10
"""Of one server: some 1,000 engines. Larger replies are not read."""
MAX_KEPT_BYTES = 8 << 20
"""Of all servers together: receipts beyond are left out."""
ATTEMPTS = 3
PAUSE_S = 0.2
"""A connection that breaks in the middle is followed by another attempt, with the same key."""

_MISSING = frozenset({404, 405, 501})
"""Statuses of a server that has no such route."""

EndpointOutcome = Literal[
    "done", "partial", "conflict", "aborted", "undecided", "refused", "unsupported", "unreachable", "timeout"
]
_SERVERS_OUTCOMES: dict[Any, EndpointOutcome] = {
    "done": "done",
    "partial": "partial",
    "conflict": "conflict",
    "aborted": "aborted",
    "undecided": "undecided",
}


class EndpointReceipt(msgspec.Struct, omit_defaults=True):
    """What one server has answered."""

    endpoint: str
    """Its URL."""
    status: int | None
    """None: there was no whole reply."""
    outcome: EndpointOutcome
    error: str | None
    engines: msgspec.Raw | msgspec.UnsetType | None = msgspec.UNSET
    """The receipts of its engines, as the server writes them; None: left out for want of room."""
    result: msgspec.Raw | msgspec.UnsetType | None = msgspec.UNSET
    """Its whole reply, where that has no receipts."""
    digests: tuple[str, ...] = ()
    """Of files with weights that it has taken."""

    @property
    def has_run(self) -> bool:
        """Whether the server has carried it out, or will on all its engines: a state holds all the same if
        some of them come late."""
        return self.outcome in ("done", "partial")

    @property
    def is_late(self) -> bool:
        return self.outcome in ("timeout", "undecided") or self.status == 504


class FanOut:
    """Asks servers, each with the key that there is for it."""

    def __init__(self, pool: EndpointPool) -> None:
        self._pool = pool
        self._places = asyncio.Semaphore(MAX_CALLS)

    async def ask_all(
        self,
        endpoints: Sequence[Endpoint],
        method: str,
        target: str,
        body: bytes,
        key: str,
        timeout_s: float,
    ) -> list[EndpointReceipt]:
        """One receipt for each endpoint, in their order."""
        asked = [self.ask(each, method, target, body, key, timeout_s) for each in endpoints]
        receipts, kept = await asyncio.gather(*asked), 0
        for receipt in receipts:
            for field in ("engines", "result"):
                value = getattr(receipt, field)
                if isinstance(value, msgspec.Raw):
                    kept += len(bytes(value))
                    if kept > MAX_KEPT_BYTES:
                        setattr(receipt, field, None)
        return receipts

    async def ask(
        self, endpoint: Endpoint, method: str, target: str, body: bytes, key: str, timeout_s: float
    ) -> EndpointReceipt:
        """What the endpoint answers within ``timeout_s``."""
        headers: Headers = [(b"accept", b"application/json")]
        if key:
            headers.append((b"idempotency-key", key.encode("latin-1")))
        if body:
            headers.append((b"content-type", b"application/json"))
        request = UpstreamRequest(method.encode(), self._pool.own_target(target), headers, body)
        try:
            async with self._places, asyncio.timeout(timeout_s):
                status, reply = await self._fetch(endpoint, request)
        except TimeoutError:
            return EndpointReceipt(endpoint.url, None, "timeout", f"No reply came within {timeout_s:g} s.")
        except TooLargeError as error:
            outcome: EndpointOutcome = "done" if error.status == 200 else "refused"
            return EndpointReceipt(endpoint.url, error.status, outcome, str(error), engines=None)
        except UpstreamError as error:
            return EndpointReceipt(endpoint.url, None, "unreachable", str(error) or "No connection.")
        return _receipt(endpoint.url, status, reply)

    async def _fetch(self, endpoint: Endpoint, request: UpstreamRequest) -> tuple[int, bytes]:
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(BrokenReplyError):
                return await fetch(self._pool.connections(endpoint), request, MAX_REPLY_BYTES)
            await asyncio.sleep(PAUSE_S)
        return await fetch(self._pool.connections(endpoint), request, MAX_REPLY_BYTES)


def _receipt(url: str, status: int, reply: bytes) -> EndpointReceipt:
    """What the reply of a server says."""
    if status in _MISSING:
        return EndpointReceipt(url, status, "unsupported", "The server has no such route.")
    try:
        fields = msgspec.json.decode(reply, type=dict[str, msgspec.Raw])
        given = msgspec.json.decode(fields["outcome"]) if "outcome" in fields else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields, given = {}, None
    succeeded = 200 <= status < 300
    outcome = _SERVERS_OUTCOMES.get(given) if isinstance(given, str) else None
    receipt = EndpointReceipt(url, status, outcome or ("done" if succeeded else "refused"), None)
    if not succeeded:
        receipt.error = _message(fields.get("error")) or f"The server answered with status {status}."
    if "engines" in fields and outcome is not None:
        receipt.engines = fields["engines"]
        with contextlib.suppress(msgspec.DecodeError):
            receipt.digests = msgspec.json.decode(fields.get("digests", b"[]"), type=tuple[str, ...])
    elif succeeded and fields:
        receipt.result = msgspec.Raw(reply)
    return receipt


def _message(error: msgspec.Raw | None) -> str | None:
    """The message of an error in OpenAI's shape."""
    if error is None:
        return None
    try:
        return msgspec.json.decode(error, type=_Error).message
    except msgspec.DecodeError:
        return None


class _Error(msgspec.Struct):
    message: str
