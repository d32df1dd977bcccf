"""Stored responses of real servers behind gateways: any gateway finds them at the server that has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.gateway.processes import Gateway, eventually, gateway
from tests.integration.server import SYNTHETIC, Server

pytestmark = pytest.mark.slow
MODEL: dict[str, Any] = {"model": "m", "max_output_tokens": 20}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        options = (*SYNTHETIC, "--response-store", "memory", "--synthetic-step-ms", "5")
        starting = [Server(*options, directory=tmp_path_factory.mktemp(name)) for name in ("a", "b")]
        yield [stack.enter_context(each) for each in starting]


@pytest.fixture(scope="module")
def fronts(servers: list[Server]) -> Iterator[list[Gateway]]:
    """Two gateways: what one has relayed, the other has to ask for."""
    urls = [server.url for server in servers]
    with gateway(*urls) as first, gateway(*urls) as second:
        yield [first, second]


def client_of(front: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="k", max_retries=0)


def test_every_gateway_finds_the_responses_of_every_server(
    fronts: list[Gateway], servers: list[Server]
) -> None:
    with client_of(fronts[0]) as first, client_of(fronts[1]) as second:
        check_all(first, second, servers)


def check_all(first: openai.OpenAI, second: openai.OpenAI, servers: list[Server]) -> None:
    stores: dict[str, str] = {}
    while len(stores) < len(servers):
        *_, last = first.responses.create(input="hello", stream=True, **MODEL)
        assert last.type == "response.incomplete"
        stores[last.response.id[:17]] = last.response.id
    for id in stores.values():
        for client in (first, second):
            assert client.responses.retrieve(id).id == id
            assert client.responses.input_items.list(id).data
            following = client.responses.create(input="more", previous_response_id=id, **MODEL)
            assert following.previous_response_id == id
            assert following.id[:17] == id[:17]
            item = following.output[0].id
            assert item is not None
            reference: Any = [{"type": "item_reference", "id": item}]
            assert client.responses.create(input=reference, **MODEL).id[:17] == id[:17]
            running = client.responses.create(input="more", previous_response_id=id, background=True, **MODEL)
        for client in (first, second):
            *_, last = client.responses.retrieve(running.id, stream=True, starting_after=0)
            assert last.type == "response.incomplete"
        second.responses.delete(id)
        with pytest.raises(openai.NotFoundError, match=id):
            first.responses.retrieve(id)
    missing = f"resp_{'0' * 36}"
    with pytest.raises(openai.NotFoundError, match=f"Previous response with id '{missing}' not found"):
        second.responses.create(input="more", previous_response_id=missing, **MODEL)


def test_a_response_that_another_gateway_cancels_is_no_failure(fronts: list[Gateway]) -> None:
    before = fronts[0].counts()
    with client_of(fronts[0]) as first, client_of(fronts[1]) as second:
        long: dict[str, Any] = {**MODEL, "max_output_tokens": 1900}
        stream = first.responses.create(input="hello", stream=True, background=True, **long)
        created = next(iter(stream))
        assert created.type in ("response.created", "response.queued")
        assert second.responses.cancel(created.response.id).status == "cancelled"
        rest = [event.type for event in stream]
    assert "error" not in rest
    eventually(lambda: sum(fronts[0].counts().values()) == sum(before.values()) + 1)
    ended = {name for name, count in fronts[0].counts().items() if count != before.get(name, 0.0)}
    assert ended <= {"ok", "ok_without_usage"}


def test_the_gateway_sees_usage_and_ends_of_both_apis(fronts: list[Gateway]) -> None:
    front = fronts[0]
    before = front.counts()
    for stream in (True, False):
        body = {**MODEL, "input": "hello", "stream": stream}
        front.client.post("/v1/responses", json=body).raise_for_status()
        turn = [{"role": "user", "content": "hello"}]
        asked = {"model": "m", "max_tokens": 20, "messages": turn, "stream": stream}
        front.client.post("/v1/messages", json=asked).raise_for_status()
    eventually(lambda: front.counts() == {**before, "ok": before.get("ok", 0.0) + 4.0})
