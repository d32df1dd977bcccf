"""Pictures in a client's messages count as they do over HTTP, and are relayed as they came."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from types import SimpleNamespace
from typing import Any, cast

from penstock.gateway.admission.client_keys import ClientKeys
from penstock.gateway.admission.intake import Intake
from penstock.gateway.requests.body_rest import BodyLimits
from penstock.gateway.requests.relayed_routes import RelayedRoutes
from penstock.gateway.requests.request_body import PICTURE_TOKENS
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.websocket.client_session import ClientSession, Handshake
from penstock.gateway.websocket.create_message import read_message


def test_a_picture_counts_as_over_http() -> None:
    picture = base64.b64encode(random.Random(7).randbytes(300_000)).decode()
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}"}
    asked = {"type": "response.create", "model": "m", "input": [{"role": "user", "content": [part]}]}
    create = read_message(json.dumps(asked).encode())
    assert create is not None
    routes, limits = RelayedRoutes(), BodyLimits(1 << 20, 1 << 20)
    shared = SimpleNamespace(
        intake=Intake(ClientKeys([], None), routes, b"x-session-id", limits),
        own_routes=SimpleNamespace(check_open=lambda: None),
    )
    handshake = Handshake("id", b"/v1/responses", [], {}, "", [], (b"via", b"1.1 x"), "s")
    session = cast("Any", SimpleNamespace(_shared=shared, _handshake=handshake))
    record = RequestRecord("/v1/responses", "id", "POST")
    incoming = asyncio.run(ClientSession._incoming(session, create, record))
    assert incoming.body is not None
    assert PICTURE_TOKENS <= incoming.body.tokens < PICTURE_TOKENS + 100
    assert incoming.raw is incoming.body.raw is create.raw, "it is relayed as it came"
    assert not incoming.values
    assert record.bytes_in == len(create.raw)
