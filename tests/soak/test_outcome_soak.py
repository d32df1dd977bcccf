"""What a client of the outcome soak saw, and whether the gateway says the same."""

from __future__ import annotations

import json

import msgspec
import pytest

from penstock.gateway.responses.outcome import Outcome
from tests.soak.config import OutcomeSoakConfig
from tests.soak.faulty_server import TOKENS, event
from tests.soak.outcome_client import Seen, View, judge
from tests.soak.outcome_soak import OutcomeReport, measure, render

TOKEN = event({"choices": [{"text": "me"}]})
DONE = b"data: [DONE]\n\n"
GATEWAY_ERROR = b'event: error\ndata: {"error":{"type":"gateway_error"}}\n\n'
SERVER_ERROR = b'data: {"error":{"message":"x"}}\n\n'


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (TOKEN * TOKENS + DONE, Seen.WHOLE),
        (TOKEN * (TOKENS - 1) + DONE, Seen.WRONG),
        (TOKEN.replace(b"me", b"he") * TOKENS + DONE, Seen.WRONG),
        (TOKEN + b'data: {"choices":[\n\n' + DONE, Seen.MALFORMED),
        (TOKEN + b"\n\n" + GATEWAY_ERROR, Seen.GATEWAY_EVENT),
        (TOKEN + SERVER_ERROR, Seen.SERVER_EVENT),
    ],
)
def test_what_a_stream_was(body: bytes, seen: Seen) -> None:
    assert judge(200, body, "me", streamed=True) == (seen, seen is Seen.GATEWAY_EVENT)


def test_what_a_whole_reply_was() -> None:
    whole = json.dumps({"choices": [{"text": "me" * TOKENS}]}).encode()
    assert judge(200, whole, "me", streamed=False) == (Seen.WHOLE, False)
    assert judge(200, whole[:-3], "me", streamed=False) == (Seen.MALFORMED, False)
    assert judge(503, b'{"error":{"type":"gateway_error"}}', "me", streamed=False) == (Seen.STATUS, True)


@pytest.mark.parametrize(
    ("view", "outcome", "status", "agrees"),
    [
        (View("a", seen=Seen.WHOLE, status=200), Outcome.OK, 200, True),
        (View("a", seen=Seen.WHOLE, status=200), Outcome.NETWORK_ERROR, 200, False),
        (View("a", seen=Seen.LEFT, status=200), Outcome.CLIENT_DISCONNECT, 200, True),
        (View("a", seen=Seen.CUT), Outcome.NETWORK_ERROR, 200, True),
        (View("a", seen=Seen.CUT), Outcome.OK, 200, False),
        (View("a", seen=Seen.STATUS, status=429), Outcome.CLIENT_ERROR, 429, True),
        (View("a", seen=Seen.STATUS, status=429), Outcome.CLIENT_ERROR, 400, False),
        (View("a", seen=Seen.STATUS, status=429, by_gateway=True), Outcome.REJECTED, 429, True),
        (View("a", seen=Seen.STATUS, status=502, by_gateway=True), Outcome.OK, 502, False),
        (View("a", seen=Seen.WRONG, status=200), Outcome.OK, 200, False),
    ],
)
def test_agreement(view: View, outcome: str, status: int, agrees: bool) -> None:
    assert (view.disagrees(outcome, status) == "") is agrees


@pytest.mark.slow
def test_a_short_soak() -> None:
    said: list[str] = []
    report = measure(OutcomeSoakConfig(minutes=0.5, clients=12, disturb_every=1.0), said.append)
    assert report.findings == {}
    assert report.requests > 200
    assert len(report.faults) > 3
    assert "all checks passed" in render(report)
    assert msgspec.json.decode(msgspec.json.encode(report), type=OutcomeReport) == report
