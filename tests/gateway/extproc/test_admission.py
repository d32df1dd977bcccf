"""Keys, budgets and flow control hold for Envoy's requests as for the gateway's own clients."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.admission.admission import Admission
from penstock.gateway.admission.budget_store import MemoryBudgetStore
from penstock.gateway.admission.budgets import Budgets
from penstock.gateway.admission.clients_file import clients_file
from penstock.gateway.admission.flow_control import FlowControl, FlowLimits
from penstock.gateway.extproc.messages import (
    BodyMode,
    CommonResponse,
    ImmediateResponse,
    MessagePart,
    ProcessingRequest,
)
from penstock.gateway.extproc.processor_stream import ProcessorStream
from penstock.gateway.routing.endpoint_capacity import EndpointCapacity
from tests.gateway.extproc.test_processor_stream import World
from tests.gateway.token_issuer import OTHER_RSA, RSA, public_jwk, signed

KEYS = """
keys:
  - name: metered
    key: sk-metered
    models: [m]
    budgets: {requests-per-day: 1}
  - {name: free, key: sk-free}
  - {name: narrow, key: sk-narrow, budgets: {concurrent-requests: 1}}
"""


class Gateway(World):
    """With keys, budgets and one place at each endpoint; its clock stands still."""

    def __init__(self, path: Path, keys: str = KEYS) -> None:
        path.write_text(keys)
        path.chmod(0o600)
        budgets = Budgets(MemoryBudgetStore(lambda: 0.0), lambda: 0.0)
        self.flow = FlowControl(FlowLimits(), lambda: self.now)
        super().__init__(admission=Admission(budgets, self.flow), client_keys=clients_file(str(path)))
        self.requests.relay.router.capacity = EndpointCapacity(1)

    async def ask(self, key: str, request_id: str, model: str = "m") -> tuple[ProcessorStream, list[Any]]:
        """The answers to a request's body."""
        headers = [
            (b":method", b"POST"),
            (b":path", b"/v1/completions"),
            (b"authorization", f"Bearer {key}".encode()),
            (b"x-request-id", request_id.encode()),
        ]
        stream = ProcessorStream(self.requests)
        first = ProcessingRequest(
            MessagePart.REQUEST_HEADERS,
            headers,
            request_mode=BodyMode.BUFFERED,
            response_mode=BodyMode.BUFFERED,
        )
        await stream.receive(first)
        body = json.dumps({"model": model, "prompt": "p", "stream": True}).encode()
        try:
            answers = await stream.receive(ProcessingRequest(MessagePart.REQUEST_BODY, body=body, end=True))
        except asyncio.CancelledError:
            stream.closed()
            raise
        return stream, answers


@pytest.fixture
def world(tmp_path: Path) -> Gateway:
    return Gateway(tmp_path / "keys.yaml")


def test_budgets_and_models(world: Gateway) -> None:
    async def run() -> None:
        _, [refused] = await world.ask("sk-metered", "0", model="dear")
        assert isinstance(refused, ImmediateResponse)
        assert (refused.status, json.loads(refused.body)["error"]["code"]) == (403, "model_not_allowed")
        stream, [sent] = await world.ask("sk-metered", "1")
        assert isinstance(sent, CommonResponse)
        headers = ProcessingRequest(MessagePart.RESPONSE_HEADERS, [(b":status", b"200")])
        [reply] = await stream.receive(headers)
        assert dict(reply.set_headers)[b"x-ratelimit-remaining-requests"] == b"0"
        _, [refused] = await world.ask("sk-metered", "2")
        assert isinstance(refused, ImmediateResponse)
        assert refused.status == 429
        assert dict(refused.headers)[b"retry-after"] == b"86400"
        assert dict(refused.headers)[b"x-ratelimit-limit-requests"] == b"1"
        assert refused.details == "penstock_rate_limit_exceeded"

    asyncio.run(run())


def test_tokens(tmp_path: Path) -> None:
    """A new one waits for its check, as a request to the gateway itself."""
    jwks = tmp_path / "jwks.json"
    jwks.write_text(json.dumps({"keys": [public_jwk(RSA, kid="k")]}))
    world = Gateway(
        tmp_path / "keys.yaml", f"issuers: [{{issuer: i, audience: a, jwks: {jwks}, models: [m]}}]"
    )
    claims = {"iss": "i", "aud": "a", "sub": "alice", "exp": world.now + 60}

    async def run() -> None:
        following = asyncio.ensure_future(world.requests.intake.keys.follow())
        await asyncio.sleep(0)
        for token, status in (
            (signed(claims, kid="k"), None),
            (signed(claims | {"exp": 0}, kid="k"), 401),
            (signed(claims, OTHER_RSA, kid="k"), 401),
            ("sk-none", 401),
        ):
            stream = ProcessorStream(world.requests)
            headers = [
                (b":method", b"GET"),
                (b":path", b"/v1/models"),
                (b"authorization", b"Bearer " + token.encode()),
            ]
            [answer] = await stream.receive(
                ProcessingRequest(
                    MessagePart.REQUEST_HEADERS, headers, request_mode=BodyMode.BUFFERED, end=True
                )
            )
            assert getattr(answer, "status", None) == status
            stream.closed()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(run())


def test_routes_that_are_not_read(world: Gateway) -> None:
    async def run() -> None:
        for path, key, status in (("/generate", "sk-metered", 403), ("/generate", "sk-free", None)):
            stream = ProcessorStream(world.requests)
            headers = [
                (b":method", b"POST"),
                (b":path", path.encode()),
                (b"authorization", f"Bearer {key}".encode()),
            ]
            first = ProcessingRequest(
                MessagePart.REQUEST_HEADERS, headers, request_mode=BodyMode.BUFFERED, end=False
            )
            [answer] = await stream.receive(first)
            assert (answer.status if isinstance(answer, ImmediateResponse) else None) == status
            stream.closed()

    asyncio.run(run())


def test_a_request_that_envoy_answers_itself_costs_nothing(world: Gateway) -> None:
    async def run() -> None:
        for request_id in "12":
            stream, [sent] = await world.ask("sk-metered", request_id)
            assert isinstance(sent, CommonResponse)
            stream.closed()
            world.logged(request_id, status=429, upstream="", attempts=0)
        assert world.counts() == {"rejected": 2.0}

    asyncio.run(run())


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_wait_for_places(world: Gateway) -> None:
    async def run() -> None:
        for request_id in "12":
            await world.ask("sk-free", request_id)
        leaver = asyncio.ensure_future(world.ask("sk-free", "3"))
        stayer = asyncio.ensure_future(world.ask("sk-free", "4"))
        await settled()
        assert world.flow.waiting == 2
        leaver.cancel()
        await settled()
        assert world.flow.waiting == 1
        world.now += 1.0
        world.logged("1")
        _, [sent] = await asyncio.wait_for(stayer, 60)
        assert isinstance(sent, CommonResponse)
        assert world.counts() == {"ok_without_usage": 1.0, "client_disconnect": 1.0}
        world.logged("2")
        world.logged("4")
        assert [each.in_flight for each in world.endpoints] == [0, 0]
        assert all(gate.promised == 0 for gate in world.flow._gates.values())

    asyncio.run(run())


def test_requests_whose_log_entries_are_lost_hold_nothing(world: Gateway) -> None:
    async def run() -> None:
        for request_id in "12":
            stream, _ = await world.ask("sk-narrow" if request_id == "1" else "sk-free", request_id)
            stream.closed()
        _, [refused] = await world.ask("sk-narrow", "3")
        assert isinstance(refused, ImmediateResponse)
        waiting = asyncio.ensure_future(world.ask("sk-free", "4"))
        await settled()
        assert world.flow.waiting == 1
        world.now += 1.0
        world.requests.on_entries_lost()
        await asyncio.wait_for(waiting, 60)
        _, [sent] = await world.ask("sk-narrow", "5")
        assert isinstance(sent, CommonResponse)
        for request_id in "1245":
            world.logged(request_id)
        assert [each.in_flight for each in world.endpoints] == [0, 0]
        assert world.counts() == {"rejected": 1.0, "ok_without_usage": 4.0}

    asyncio.run(run())
