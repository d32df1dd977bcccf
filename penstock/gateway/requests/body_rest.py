"""Bodies that are only relayed: a beginning is read, the rest goes to the endpoint as it comes."""

from __future__ import annotations

import asyncio

import msgspec

from penstock.gateway.requests.byte_rounds import ByteRounds
from penstock.gateway.requests.caller import Caller
from penstock.gateway.requests.form_scan import FormScan
from penstock.gateway.requests.long_values import NO_VALUES, LongValues
from penstock.gateway.requests.model_field import form_type
from penstock.gateway.requests.relayed_routes import INFERENCE_ROUTES
from penstock.gateway.requests.request_body import RequestBody
from penstock.http.errors import ApiError
from penstock.http.request import HttpRequest

BEGINNING = 64 << 10
"""Bytes that are held of a body before its rest is relayed, so that the request can still go to another
endpoint; and of smaller bodies all."""
_JSON = (b"{", b"[", b"")


class BodyRest:
    """What follows the beginning of a body. It is read once, so once it is the request goes to no other
    endpoint."""

    def __init__(self, http: HttpRequest, left: int | None, limit: int, rounds: ByteRounds) -> None:
        """``left``: bytes that follow, None: unknown; at most ``limit`` may."""
        self.left = left
        self.begun = self.complete = False
        self.size = 0
        """Bytes that were read."""
        self.refusal: ApiError | None = None
        """What the client is to get, as the rest does not come or is too large."""
        self.body: RequestBody | None = None
        """What the whole body says, once it is known, if anybody asks."""
        self.sending: asyncio.Task[None] | None = None
        """Sends it to an endpoint."""
        self._http = http
        self._limit = limit
        self._rounds = rounds

    def _kept(self) -> int:
        """Bytes that are held when the latest part has been read: they stay in the server's account."""
        return 0

    async def read(self) -> bytes:
        """The next part; empty at the end. Raises ClientGone, and ApiError if the rest does not come."""
        self.begun = True
        part = await self._http.read_part()
        self._http.sink.release(self._kept())
        await self._rounds.spend(len(part))
        self.size += len(part)
        self.complete = not part or self.size == self.left  # the server may answer before the end is read
        if self.size > self._limit:
            raise beyond_relayed()
        return part


class ReceivedBody(msgspec.Struct, frozen=True):
    """A body as far as it is read before the request is routed."""

    text: bytes
    """With marks in the place of ``values``. Of JSON with a rest, ended so that it is JSON."""
    rest: BodyRest | None = None
    """What follows; None: nothing."""
    values: LongValues = NO_VALUES
    """Long base64 of JSON."""
    came: int | None = None
    """Bytes that have come, with the values; None: those of ``text``."""

    @property
    def size(self) -> int:
        """Bytes that have come."""
        return len(self.text) if self.came is None else self.came


class BodyLimits:
    """The bounds of bodies, in bytes: of those that are read, and of others, which endpoints get as they
    come."""

    def __init__(self, max_read: int, max_relayed: int) -> None:
        self.max_read, self._max_relayed = max_read, max(max_read, max_relayed)
        self.rounds = ByteRounds()

    async def read(self, http: HttpRequest, caller: Caller) -> ReceivedBody:
        """A body, or its beginning with the model, and its rest. Raises ApiError, ClientGone.

        JSON is read whole, as its model may stand anywhere; and all of a key that is for some models: a
        second model behind the first must not get around that.
        """
        given = http.fields.get(b"content-length")
        length = None if given is None else int(given)
        small = http.body_complete or (length is not None and length <= BEGINNING)
        if small or caller.models or (length is None and caller.is_limited):
            return ReceivedBody(await http.read_body(self.max_read, too_large))
        if length is not None and length > self._max_relayed:
            raise beyond_relayed()
        kind = form_type(http.headers)
        scan = None if kind is None or http.path not in INFERENCE_ROUTES else FormScan(kind)
        held = bytearray()
        while part := await http.read_part():
            held += part
            if scan is not None:
                scan.feed(held)
            if len(held) >= BEGINNING and (
                scan.done if scan is not None else kind or held[:BEGINNING].lstrip()[:1] not in _JSON
            ):
                left = None if length is None else length - len(held)
                return ReceivedBody(
                    bytes(held), BodyRest(http, left, self._max_relayed - len(held), self.rounds)
                )
            if len(held) > self.max_read:
                raise too_large(self.max_read) if scan is None else self._no_model()
        return ReceivedBody(bytes(held))

    def _no_model(self) -> ApiError:
        text = (
            f"The form has no part 'model' in its first {self.max_read} bytes (--max-request-bytes). "
            "Send it before the file."
        )
        return ApiError(413, text, param="model", code="too_large")


def too_large(limit: int) -> ApiError:
    text = f"The request body is larger than the {limit} bytes allowed by --max-request-bytes."
    return ApiError(413, text, code="too_large")


def beyond_relayed() -> ApiError:
    text = "The request body is larger than what --max-relayed-bytes allows."
    return ApiError(413, text, code="too_large")
