"""Bodies of requests that generate: held whole, with long base64 apart, or relayed as they come.

What routes a request may stand behind its pictures: OpenAI's clients write ``model`` last. So a body is held
until its model is known; then, if nothing else rests on its end, the server gets the rest as it comes. It can
do nothing with it before the end, and the last part is sent only after the whole body was found to say what
its beginning did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from penstock.gateway.requests.body_rest import BEGINNING, BodyLimits, BodyRest, ReceivedBody, too_large
from penstock.gateway.requests.byte_rounds import ByteRounds
from penstock.gateway.requests.caller import Caller
from penstock.gateway.requests.gemini_path import model_in, names_its_model
from penstock.gateway.requests.long_values import LongValues, LongValueScan, split_by_turns
from penstock.gateway.requests.model_field import read_model
from penstock.gateway.requests.named_response import COMPACT, RESPONSES
from penstock.gateway.requests.request_body import RequestBody
from penstock.http.errors import ApiError
from penstock.http.request import HttpRequest

MODEL_HEADER = b"x-gateway-model-name"
"""Header of the Gateway API Inference Extension that names the model of the body."""
MAX_BEGINNING = 1 << 20
"""Bytes of a body in which its model has to stand, so that the rest is relayed as it comes."""
MAX_TRIES = 8
"""Long values before which the model is looked for."""
SENT_BYTES = 256 << 10
"""Bytes of a held body that are sent at a time."""


class CheckedRest(BodyRest):
    """The rest of a body of JSON. Its last part is not read before the whole body was checked."""

    def __init__(
        self, http: HttpRequest, left: int | None, limits: BodyLimits, scan: LongValueScan, model: str
    ) -> None:
        """``scan``: has the beginning, with the ``model``."""
        super().__init__(http, left, limits.max_read - scan.size, limits.rounds)
        self.model = model
        self.beginning = scan.beginning()[1]
        """Bytes that come before."""
        self.check: Callable[[bytes, LongValues], RequestBody]
        """Reads the whole body. Raises ApiError."""
        self._scan = scan
        self._limit_all = limits.max_read
        self._latest = b""

    def _kept(self) -> int:
        return self._scan.text_bytes

    async def read(self) -> bytes:
        """Raises ApiError also for a body that is not what its beginning was taken for."""
        self._scan.forget()
        while self.body is None:
            part = await super().read()
            self._scan.feed(part)
            before, self._latest = self._latest, part
            if self.complete:
                self.body = self.check(*self._scan.finish())
                return before + part
            if before:
                return before
        return b""

    async def hold(self) -> ReceivedBody:
        """The whole body, if nothing of its rest was read yet. Raises ApiError, ClientGone."""
        while part := await self._http.read_part():  # it stays in the server's account of held bytes
            self._scan.feed(part)
            await self._rounds.spend(len(part))
            if self._scan.size > self._limit_all:
                raise too_large(self._limit_all)
        return _whole(self._scan)


class HeldRest:
    """What is sent of a held body after its first piece, as a :class:`BodyRest`: again for each attempt."""

    def __init__(self, pieces: list[bytes], rounds: ByteRounds) -> None:
        self.left = sum(map(len, pieces))
        self.begun, self.complete, self.size = False, True, 0
        self.refusal: ApiError | None = None
        self.sending: asyncio.Task[None] | None = None
        self.body: RequestBody | None = None
        self._pieces = self._joined(pieces)
        self._rounds = rounds

    async def read(self) -> bytes:
        part = next(self._pieces, b"")
        await self._rounds.spend(len(part))
        return part

    @staticmethod
    def _joined(pieces: list[bytes]) -> Iterator[bytes]:
        part, size = [], 0
        for piece in pieces:
            part.append(piece)
            size += len(piece)
            if size >= SENT_BYTES:
                yield b"".join(part)
                part, size = [], 0
        yield b"".join(part)


async def received_whole(raw: bytes) -> ReceivedBody:
    """A body that has come, with its long base64 apart."""
    text, values = await split_by_turns(raw)
    return ReceivedBody(text, None, values, len(raw))


async def read_generation(http: HttpRequest, caller: Caller, limits: BodyLimits) -> ReceivedBody:
    """The body of a request that generates, or its beginning and its rest. Raises ApiError, ClientGone."""
    limit = limits.max_read
    given = http.fields.get(b"content-length")
    length = None if given is None else int(given)
    if http.body_complete or (length is not None and (length <= BEGINNING or length > limit)):
        return await received_whole(await http.read_body(limit, too_large))
    scan, tried = LongValueScan(), -1
    may_stream = not (caller.models or caller.is_limited or http.path in (RESPONSES, COMPACT))
    while part := await http.read_part():
        scan.feed(part)
        await limits.rounds.spend(len(part))
        if scan.size > limit:
            raise too_large(limit)
        if not (may_stream and scan.in_value and scan.size != length and tried < scan.values < MAX_TRIES):
            continue
        tried = scan.values
        if scan.size > MAX_BEGINNING or scan.text_bytes > BEGINNING:
            may_stream = False
            continue
        text, _ = scan.beginning()
        if (model := _model(http, text)) is not None:
            left = None if length is None else length - scan.size
            rest = CheckedRest(http, left, limits, scan, model)
            return ReceivedBody(text, rest, came=scan.size)
    return _whole(scan)


def _model(http: HttpRequest, text: bytes) -> str | None:
    """The model that the beginning of a body, or its head, names."""
    if names_its_model(http.path):
        return model_in(http.target)
    try:
        named = read_model(http.headers, text)
    except ApiError:
        return None
    return named or http.header(MODEL_HEADER) or None


def _whole(scan: LongValueScan) -> ReceivedBody:
    size = scan.size
    text, values = scan.finish()
    return ReceivedBody(text, None, values, size)
