"""Sends the rest of a request's body to an endpoint, as its client sends it and the endpoint takes it."""

from __future__ import annotations

import asyncio

from penstock.gateway.relay.attempt import Attempt
from penstock.gateway.requests.body_rest import BodyRest
from penstock.gateway.requests.byte_rounds import ByteRounds
from penstock.gateway.requests.generation_body import SENT_BYTES, CheckedRest, HeldRest
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.responses.expected_reply import expected_reply
from penstock.gateway.upstream.exchange import Exchange
from penstock.http.errors import ApiError
from penstock.http.request import ClientGone

ERROR = 400
"""A reply with this status or a higher one may end before the body: nothing more is sent."""


def parts_of(
    incoming: IncomingRequest, raw: bytes, rounds: ByteRounds
) -> tuple[bytes, BodyRest | HeldRest | None]:
    """What is sent of a request at once, and what follows; ``raw``: its body, with marks for its values.
    ``rounds``: of the held bodies that are sent."""
    if isinstance(incoming.rest, CheckedRest):
        return incoming.rest.beginning, incoming.rest
    if not incoming.values:
        return raw, incoming.rest
    pieces = incoming.values.filled(raw)
    if sum(map(len, pieces)) <= SENT_BYTES:
        return b"".join(pieces), None
    return pieces[0], HeldRest(pieces[1:], rounds)


async def upload(rest: BodyRest | HeldRest, exchange: Exchange, attempt: Attempt, path: str) -> None:
    """Send what is left, unless the attempt ends before. It is told when the client leaves, or does not send
    what it may. ``path``: of the request."""
    try:
        while not attempt.ended.done():  # a connection that had ended has taken nothing of it
            part = await rest.read()
            if rest.body is not None:
                attempt.expects = expected_reply(rest.body, path)
            await exchange.send_part(part)
            if not part:
                return
            await asyncio.sleep(0)  # what the endpoint has answered meanwhile is read before more is sent
            if attempt.ended.done() or (attempt.status or 0) >= ERROR:
                return
            attempt.on_uploaded()
    except ClientGone:
        attempt.on_disconnect()
    except ApiError as error:
        if not attempt.ended.done():
            rest.refusal = error
            attempt.on_disconnect()
