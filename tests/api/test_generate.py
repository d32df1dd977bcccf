"""From the headers and a plan to streams that engines run, and back if one of them cannot be started."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from penstock.api.background import BackgroundResponses
from penstock.api.byte_budget import ByteBudget
from penstock.api.generate import GenerationRoutes, Work
from penstock.config.serve import ServeConfig
from penstock.dialects.completions.dialect import Completions
from penstock.dialects.responses.dialect import Responses
from penstock.dispatch.engine_client import NO_HINTS, EngineClient, RoutingHints
from penstock.generation.dialect import NO_INFO, RequestInfo
from penstock.generation.prompt.prompt_encoder import PromptEncoder
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.request.validation import MAX_LOGPROB_BYTES
from penstock.http.errors import ApiError
from penstock.metrics.store_metrics import StoreMetrics
from penstock.store.response_store import ResponseStore
from penstock.streaming.request_states import StreamState
from penstock.streaming.stream import Stream
from penstock.wire.messages import Submit
from tests.api.requests import api_request
from tests.generation.planning import body, planners, tiny_input_processor, tiny_tokenizer
from tests.generation.replying import PROMPT, Desk, FakeFleet, tables_of
from tests.http.requests import http_request
from tests.store.stores import entry, opened

PLANNER = planners()
N = 4


class Fleet(FakeFleet):
    """An engine that takes streams up to the one at ``limit``, where ``fail`` is called."""

    def __init__(self, limit: int, fail: Callable[[], Any]) -> None:
        super().__init__()
        self.submitted: list[Stream] = []
        self.engines = [SimpleNamespace(rank=rank) for rank in range(3)]
        self._limit = limit
        self._fail = fail
        self.pumps = 0

    def full(self, *hints: object) -> bool:
        return False

    def pick(self, *hints: object) -> object:
        return self.engines[0] if len(self.submitted) < self._limit else self._fail()

    def submit(self, stream: Stream, request: Submit, known: object = None) -> None:
        stream.request = request
        self.submitted.append(stream)

    def abort(self, stream: Stream, *, stopped: bool = False) -> None:
        if stream.state is StreamState.DROPPED:
            super().abort(stream, stopped=stopped)

    def refusal(self) -> str:
        return ""

    def accepts_streams(self, rank: int | None = None) -> bool:
        return self._limit > 0

    def yield_to_pump(self) -> None:
        self.pumps += 1


def overflow() -> None:
    raise OverflowError("cannot be encoded")


def none() -> None:
    return None


def in_routes(fleet: Fleet, test: Callable[[GenerationRoutes, Desk], None]) -> None:
    async def run() -> None:
        desk = Desk(tables_of(tiny_tokenizer().raw), engine_client=fleet)
        desk.context.engine_client = cast(EngineClient, fleet)
        routes = GenerationRoutes(
            ServeConfig(), PromptEncoder(tiny_tokenizer(), None), desk.context, ByteBudget(1 << 20)
        )
        test(routes, desk)

    asyncio.run(run())


@pytest.mark.parametrize("place", ["pick", "add", "open", "submit"])
@pytest.mark.parametrize("at", [0, 2])
def test_an_exception_on_the_way_leaves_no_stream_behind(place: str, at: int) -> None:
    fleet = Fleet(at if place == "pick" else 99, overflow)

    def test(routes: GenerationRoutes, desk: Desk) -> None:
        plan = PLANNER.completion(body(n=N))
        reply = CollectedReply(desk.context, plan, desk._format(False), 0.0)
        owner: Any = {"add": reply, "open": desk.streams, "submit": fleet}.get(place)
        if owner is not None:
            original = getattr(owner, place)
            calls: list[object] = []

            def call(*arguments: Any, **options: Any) -> Any:
                calls.append(arguments)
                return overflow() if len(calls) > at else original(*arguments, **options)

            setattr(owner, place, call)
        samplings = [plan.sampling(2, index) for index in range(N)]
        work = Work(plan, reply.format, NO_HINTS, [PROMPT], samplings, ("1", "cmpl-1"))
        with pytest.raises(OverflowError):
            routes._submit(reply, work)
        assert reply.ended
        assert all(choice.stream is None for choice in reply.choices)
        assert fleet.aborted[:at] == fleet.submitted
        assert fleet.pumps == 0
        reply.on_disconnect()  # what ended once ends no second time

    in_routes(fleet, test)


def test_a_named_engine_that_takes_nothing_is_named_in_the_error() -> None:
    def test(routes: GenerationRoutes, desk: Desk) -> None:
        assert "Engine 2 (X-data-parallel-rank) takes no" in routes.no_engine(2).message
        assert routes.no_engine().message == "No engine takes requests."

    in_routes(Fleet(1, none), test)


@pytest.mark.parametrize("value", ["9" * 5000, "3", "-1", "1.0", " 1", "", "\u00b2", "x" * 100_000])
def test_a_rank_that_there_is_not_is_refused_by_the_name_of_its_header(value: str) -> None:
    def test(routes: GenerationRoutes, desk: Desk) -> None:
        with pytest.raises(ApiError, match=r"X-data-parallel-rank is '.{0,25}', there are ") as error:
            routes.routing_hints(http_request(headers=[(b"x-data-parallel-rank", value.encode("latin-1"))]))
        assert error.value.status == 400

    in_routes(Fleet(1, none), test)


def test_a_rank_may_have_leading_zeros() -> None:
    def test(routes: GenerationRoutes, desk: Desk) -> None:
        headers = [(b"x-data-parallel-rank", b"002"), (b"x-session-id", b"s")]
        assert routes.routing_hints(http_request(headers=headers)) == RoutingHints("s", 2)

    in_routes(Fleet(1, none), test)


def test_logprobs_of_the_whole_vocabulary_are_bounded_for_all_requests_together() -> None:
    def test(routes: GenerationRoutes, desk: Desk) -> None:
        first, second = (api_request() for _ in range(2))
        routes._running = 2
        routes._reserve_logprobs(first, MAX_LOGPROB_BYTES)
        with pytest.raises(ApiError, match="128 MiB") as error:
            routes._reserve_logprobs(second, 8)
        assert (error.value.status, error.value.code) == (429, "overloaded")
        routes._reserve_logprobs(second, 0)
        routes.on_request_end(second)
        routes.on_request_end(first)
        routes._reserve_logprobs(second, MAX_LOGPROB_BYTES)

    in_routes(Fleet(1, none), test)


@pytest.mark.parametrize(("size", "inline"), [(10, True), (1 << 20, False)])
def test_a_long_stored_conversation_is_planned_in_a_thread(size: int, inline: bool) -> None:
    """However short the body is that continues it."""
    threads = []

    class Continuing(Completions):
        async def _find(self) -> Any:
            return SimpleNamespace(size=size, conversation=None)

        def look_up(self, body: bytes, info: RequestInfo) -> Any:
            return self._find()

        def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> Any:
            threads.append(threading.get_ident())
            raise ApiError(400, "planned")

    async def run() -> None:
        desk = Desk(tables_of(tiny_tokenizer().raw))
        desk.context.engine_client = cast(EngineClient, Fleet(1, none))
        encoder = PromptEncoder(tiny_tokenizer(), None)
        routes = GenerationRoutes(ServeConfig(), encoder, desk.context, ByteBudget(1 << 20))
        request = api_request(http_request("POST", body=b"{}"))
        dialect = Continuing(ServeConfig(), tiny_input_processor())
        with pytest.raises(ApiError, match="planned"):
            await routes._run(dialect, request)

    asyncio.run(run())
    assert (threads == [threading.get_ident()]) is inline


@pytest.mark.parametrize(
    ("headers", "key", "session"),
    [([], None, None), ([], "key", "key"), ([(b"x-session-id", b"header")], "key", "header")],
)
def test_a_session_is_the_headers_or_the_requests(
    headers: list[tuple[bytes, bytes]], key: str | None, session: str | None
) -> None:
    plan = PLANNER.completion(body(prompt_cache_key=key))

    def test(routes: GenerationRoutes, desk: Desk) -> None:
        assert routes.routing_hints(http_request(headers=headers), plan.session).session == session

    in_routes(Fleet(1, none), test)


@pytest.mark.parametrize("refusal", ["full", "not stored", "no engine"])
def test_a_refused_background_response_does_not_count_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    if refusal == "full":
        monkeypatch.setattr("penstock.api.background.MAX_RUNS", 0)

    async def run() -> None:
        desk = Desk(tables_of(tiny_tokenizer().raw))
        fleet = Fleet(0 if refusal == "no engine" else 1, none)
        desk.context.engine_client = cast(EngineClient, fleet)
        encoder = PromptEncoder(tiny_tokenizer(), None)
        plan = PLANNER.completion(body(stream=True))
        with opened(tmp_path) as store:
            background = BackgroundResponses(store, StoreMetrics())
            routes = GenerationRoutes(ServeConfig(), encoder, desk.context, ByteBudget(1 << 20), background)
            stored = entry(store, status="queued")
            if refusal == "not stored":
                await store.put(stored)  # its id is taken
            format = Mock()
            work = Work(plan, format, NO_HINTS, [PROMPT], [plan.sampling(2)], ("1", "resp_1"))
            request = api_request()
            request.logprob_bytes = 8
            routes.begin_one()
            routes._logprob_bytes = 8
            with pytest.raises(ApiError):
                await routes._run_in_background(work, stored, request)
            routes.on_request_end(request)
            await routes.drain()
            assert routes._logprob_bytes == 0

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_background_response_is_told_at_once_and_stays_queued_until_it_begins(tmp_path: Path) -> None:
    async def run() -> None:
        desk = Desk(tables_of(tiny_tokenizer().raw))
        desk.context.engine_client = cast(EngineClient, Fleet(1, none))
        with opened(tmp_path) as store:
            dialect = Responses(ServeConfig(), tiny_input_processor(), store)
            plan = dialect.plan(b'{"input":"Hi.","background":true}')
            background = BackgroundResponses(store, StoreMetrics())
            encoder = PromptEncoder(tiny_tokenizer(), None)
            routes = GenerationRoutes(ServeConfig(), encoder, desk.context, ByteBudget(1 << 20), background)
            format = dialect.reply_format(plan, "r")
            stored = format.background_entry()
            assert stored is not None
            request = api_request()
            work = Work(plan, format, NO_HINTS, [PROMPT], [plan.sampling(2)], ("1", "resp_1"))
            await routes._run_in_background(work, stored, request)
            told, begun = await followed(store, stored.id, until=2)
            assert told == ["response.created", "response.queued"]
            assert begun == "queued"
            desk.positions[0] = 0
            desk.deliver(desk.rows(0, [[5]]))
            told, begun = await followed(store, stored.id, until=3)
            assert told[2] == "response.in_progress"
            assert begun == "in_progress"

    asyncio.run(asyncio.wait_for(run(), 60))


async def followed(store: ResponseStore, id: str, *, until: int) -> tuple[list[str], str]:
    """The types of the events of a response, once there are as many, and its status."""
    while True:
        version = store.version
        page = await store.page(id, "", -1, 1 << 20)
        assert page is not None
        told = re.findall(rb"^event: (.*)$", page.data, re.MULTILINE)
        if len(told) >= until:
            return [each.decode() for each in told], page.status
        await store.changed_since(version, 0.05)


@pytest.mark.parametrize("tokenize", [False, True])
def test_tenants_share_no_tokenized_messages(tokenize: bool) -> None:
    dialect = Mock(plan=lambda text, info, found: PLANNER.completion(text))

    def test(routes: GenerationRoutes, desk: Desk) -> None:
        routes.planner._encoder.encode = Mock(return_value=(bytes(8), 2))  # type: ignore[method-assign]
        info = RequestInfo(tenant="a")
        plan, prompts = routes.planner._plan(dialect, body(cache_salt="b"), info, None, tokenize=tokenize)
        assert plan.cache_salt == "ab"
        prompts = prompts or routes.planner._tokenize(plan)
        assert prompts is not None
        assert prompts[0].length == 2
        routes.planner._encoder.encode.assert_called_once_with("def main():\n", True, "ab", None)

    in_routes(Fleet(1, none), test)
