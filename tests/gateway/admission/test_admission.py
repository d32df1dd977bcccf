"""What a request reserves when it is admitted, and what it is charged when it has ended."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.gateway.admission.admission import FIRST_OUTPUT, Admission, Permit
from penstock.gateway.admission.budget_store import MemoryBudgetStore
from penstock.gateway.admission.budgets import Budgets
from penstock.gateway.admission.flow_control import FlowControl, FlowLimits
from penstock.gateway.metric_definitions import QUEUED, QUEUED_BYTES
from penstock.gateway.requests.caller import Budget, Caller
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.requests.request_body import read_request
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.responses.response_observer import Observation
from penstock.gateway.responses.token_usage import ReportedUsage
from penstock.http.errors import ApiError

DAY_S = 86_400.0
SENDER = Caller(
    "a", "a", budgets=(Budget("requests-per-day", 100, DAY_S), Budget("tokens-per-day", 10_000, DAY_S))
)
PROMPT = "x" * 398  # 400 characters of JSON, so 100 tokens


class Admitted:
    """Requests of one client; the clock stands still, so that nothing refills."""

    def __init__(self, *, flow: bool = False, places: int = 10**6) -> None:
        self.store = MemoryBudgetStore(lambda: 0.0)
        control = FlowControl(FlowLimits(), lambda: 0.0) if flow else None
        self.admission = Admission(Budgets(self.store, lambda: 0.0), control, b"x-flow")
        self.places = places

    def used(self) -> tuple[int, int]:
        """Requests and tokens that are charged."""
        debts = [self.store._full_at.get(("a", budget.name), 0.0) for budget in SENDER.budgets]
        requests, tokens = (
            round(debt / DAY_S * budget.amount) for debt, budget in zip(debts, SENDER.budgets, strict=True)
        )
        return requests, tokens

    async def admit(
        self, path: str = "/v1/completions", *, method: str = "POST", headers: Any = (), **fields: Any
    ) -> tuple[RequestRecord, Permit | None]:
        raw = json.dumps({"model": "m", "prompt": PROMPT, **fields}).encode()
        body = read_request(raw) if path == "/v1/completions" else None
        record = RequestRecord(path, method=method, caller=SENDER)
        incoming = IncomingRequest(method, b"", path, list(headers), raw, body)
        permit = self.admission.permit(incoming, record)
        if permit is not None:
            await self.admission.enter(
                permit, record, lambda: ("all", lambda promised, now: self.places > promised), None
            )
        return record, permit

    async def run(self, usage: ReportedUsage | None, *, status: int = 200, **fields: Any) -> None:
        """A request from its admission to its end."""
        record, permit = await self.admit(**fields)
        assert permit is not None
        record.attempts, record.status, record.outcome = 1, status, Outcome.OK
        record.seen = Observation(usage=usage)
        self.admission.finish(permit, record)


def test_estimates_are_replaced_by_usage() -> None:
    async def run() -> None:
        admitted = Admitted()
        _, permit = await admitted.admit(max_tokens=40)
        assert permit == Permit(100, 40, permit.reserved if permit else None)
        assert admitted.used() == (1, 140)
        await admitted.run(ReportedUsage(90, 20), max_tokens=40)
        assert admitted.used() == (2, 250)

    asyncio.run(run())


def test_replies_are_estimated_by_those_before() -> None:
    async def run() -> None:
        admitted = Admitted()
        _, first = await admitted.admit(max_tokens=32_000)
        assert first is not None
        assert first.output_tokens == FIRST_OUTPUT
        for _ in range(40):
            await admitted.run(ReportedUsage(1, 20))
        _, later = await admitted.admit()
        assert later is not None
        assert 20 <= later.output_tokens < 30

    asyncio.run(run())


def test_one_wrong_count_does_not_spoil_the_estimates() -> None:
    async def run() -> None:
        admitted = Admitted()
        await admitted.run(ReportedUsage(1, 1 << 31))
        admitted.store._full_at.clear()
        _, next_one = await admitted.admit()
        assert next_one is not None
        assert next_one.output_tokens <= 2 * FIRST_OUTPUT

    asyncio.run(run())


@pytest.mark.parametrize(("status", "used"), [(400, (1, 0)), (500, (1, 0)), (200, (1, 100 + FIRST_OUTPUT))])
def test_replies_without_usage(status: int, used: tuple[int, int]) -> None:
    """Errors cost the request alone; where a server says nothing, the estimate stands."""
    admitted = Admitted()
    asyncio.run(admitted.run(None, status=status))
    assert admitted.used() == used


def test_requests_that_no_endpoint_got_cost_nothing() -> None:
    async def run() -> None:
        admitted = Admitted()
        record, permit = await admitted.admit()
        assert permit is not None
        record.status = 503
        admitted.admission.finish(permit, record)
        assert admitted.used() == (0, 0)

    asyncio.run(run())


def test_requests_that_are_refused_a_place_cost_nothing() -> None:
    async def run() -> None:
        admitted = Admitted(flow=True, places=0)
        waiting = asyncio.ensure_future(admitted.admit())
        await asyncio.sleep(0)
        assert admitted.used() == (1, 100 + FIRST_OUTPUT)
        figures = {each.metric: each.value for each in admitted.admission.figures()}
        assert figures.keys() == {QUEUED, QUEUED_BYTES}
        assert figures[QUEUED] == 1
        assert figures[QUEUED_BYTES] > 0
        assert admitted.admission.stop() == 1
        with pytest.raises(ApiError):
            await waiting
        assert admitted.used() == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "charged"),
    [
        ("POST", "/v1/embeddings", True),
        ("POST", "/v1/images/edits", True),
        ("POST", "/v1/images/variations", True),
        ("POST", "/v1/videos", True),
        ("POST", "/embed_sparse", True),
        ("POST", "/v1/responses/resp_1/cancel", False),
        ("POST", "/v1/files", False),
        ("POST", "/tokenize", False),
        ("GET", "/v1/models", False),
    ],
)
def test_other_routes(method: str, path: str, charged: bool) -> None:
    admitted = Admitted(flow=True)
    _, permit = asyncio.run(admitted.admit(path, method=method))
    assert (permit is not None) is charged
    assert (admitted.used()[0] == 1) is charged


def test_files_in_forms_are_no_text() -> None:
    admitted = Admitted()
    record = RequestRecord("/v1/audio/transcriptions", method="POST", caller=SENDER)
    headers = [(b"content-type", b"multipart/form-data; boundary=x")]
    incoming = IncomingRequest("POST", b"", record.path, headers, b"x" * 51_200, None)
    free = ("all", lambda promised, now: True)
    permit = admitted.admission.permit(incoming, record)
    assert permit is not None
    asyncio.run(admitted.admission.enter(permit, record, lambda: free, None))
    assert admitted.used() == (1, 100)


def test_flows_are_named_by_the_header_or_the_key() -> None:
    async def run() -> None:
        admitted = Admitted(flow=True)
        for headers, flow in (([], "a"), ([(b"x-flow", b"t" * 999)], "t" * 128)):
            _, permit = await admitted.admit(headers=headers)
            assert permit is not None
            assert permit.flow is not None
            assert permit.flow.flow == flow

    asyncio.run(run())


@pytest.mark.parametrize("text", [b"soon", b"-1", b"nan", b"inf"])
def test_a_wait_that_is_none(text: bytes) -> None:
    admitted = Admitted(flow=True)
    with pytest.raises(ApiError, match="it takes a number of seconds, at least 0"):
        asyncio.run(admitted.admit(headers=[(b"x-queue-timeout", text)]))
    assert admitted.used() == (0, 0)


def test_waiting_is_a_part_of_the_longest_request() -> None:
    async def run() -> None:
        admitted = Admitted(flow=True)
        admitted.admission.longest_request_s = 60.0
        _, permit = await admitted.admit()
        assert permit is not None
        assert permit.flow is not None
        assert permit.flow.deadline == 60.0

    asyncio.run(run())
