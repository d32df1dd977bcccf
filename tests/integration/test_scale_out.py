"""Several API servers and engines with a coordinator: spread, common figures, and life without it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.integration.server import SYNTHETIC, Server, all_up, total, wait_until

SERVERS, ENGINES = 3, 4
WAIT_S = 60


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--api-server-count", str(SERVERS), "--data-parallel-size", str(ENGINES))
    with Server(*SYNTHETIC, *options, directory=tmp_path_factory.mktemp("fleet")) as running:
        wait_until(lambda: all_up(running, ENGINES, SERVERS), WAIT_S, "connecting to all engines")
        yield running


def per_engine(fleet: Server) -> list[float]:
    """Requests that each engine has ended well."""
    return [
        fleet.metric("vllm:request_success_total", engine=str(rank), finished_reason="length")
        for rank in range(ENGINES)
    ]


def ask(fleet: Server, requests: int, **headers: str) -> list[float]:
    """Send so many at the same time; how many each engine got."""
    before = per_engine(fleet)
    body = {"prompt": "hello", "max_tokens": 30, "ignore_eos": True}
    with ThreadPoolExecutor(32) as pool:
        replies = list(
            pool.map(lambda _: fleet.post("/v1/completions", body, **headers).status_code, range(requests))
        )
    assert replies == [200] * requests

    def counted() -> bool:
        return sum(per_engine(fleet)) - sum(before) == requests

    wait_until(counted, WAIT_S, "the metrics of all requests")
    return [after - earlier for after, earlier in zip(per_engine(fleet), before, strict=True)]


def test_a_session_goes_to_one_engine(fleet: Server) -> None:
    with httpx.Client(base_url=fleet.url, headers={"x-session-id": "s"}, timeout=30) as client:
        before = per_engine(fleet)
        for _ in range(12):  # one after the other, over one connection
            client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2}).raise_for_status()
        wait_until(lambda: sum(per_engine(fleet)) - sum(before) == 12, WAIT_S, "the metrics")
        more = [after - earlier for after, earlier in zip(per_engine(fleet), before, strict=True)]
    assert sorted(more) == [0, 0, 0, 12]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 7}])
def test_every_engine_gives_the_same_text(fleet: Server, fields: dict[str, int]) -> None:
    body = {"prompt": "hello", "max_tokens": 8, **fields}

    def text(rank: int) -> str:
        reply = fleet.post("/v1/completions", body, **{"x-data-parallel-rank": str(rank)})
        answer: str = reply.raise_for_status().json()["choices"][0]["text"]
        return answer

    assert len({text(rank) for rank in range(ENGINES)}) == 1


def test_an_engine_may_be_named(fleet: Server) -> None:
    assert ask(fleet, 10, **{"x-data-parallel-rank": "2"}) == [0, 0, 10, 0]


@pytest.mark.parametrize("rank", ["4", "-1", "x", "²", "9" * 5000])
def test_an_engine_that_there_is_not(fleet: Server, rank: str) -> None:
    reply = httpx.post(
        f"{fleet.url}/v1/completions",
        json={"prompt": "hello"},
        headers={"x-data-parallel-rank": rank.encode()},
        timeout=30,
    )
    assert reply.status_code == 400
    assert "there are engines 0 to 3" in reply.json()["error"]["message"]


def agreed(fleet: Server) -> float:
    """Requests that ended, once all API servers say the same: what was asked before is known to each.

    API servers that have had as many requests each and do not know of the others' yet would agree, too: they
    must also agree with the engines, whose count one of them at least knows.
    """

    def known() -> set[float]:
        text = fleet.metrics()
        return {
            total(text, "penstock:requests_total", outcome="length"),
            total(text, "vllm:request_success_total", finished_reason="length"),
        }

    found: set[float] = set()

    def same() -> bool:
        found.clear()
        found.update(*(known() for _ in range(3 * SERVERS)))
        return len(found) == 1

    wait_until(same, WAIT_S, "agreement")
    return found.pop()


def test_any_api_server_describes_the_whole_fleet(fleet: Server) -> None:
    before = agreed(fleet)
    ask(fleet, 60)

    def told() -> bool:
        return all(
            fleet.metric("penstock:requests_total", outcome="length") == before + 60
            for _ in range(3 * SERVERS)
        )

    wait_until(told, WAIT_S, "every API server knowing of all requests")


def test_counters_outlive_an_api_server(fleet: Server) -> None:
    ask(fleet, 30)
    before = agreed(fleet)

    def ended() -> float:
        return fleet.metric("penstock:requests_total", outcome="length")

    fleet.children("api-server")[0].kill()
    wait_until(lambda: len(fleet.children("api-server")) == SERVERS, WAIT_S, "the restart")
    wait_until(lambda: all_up(fleet, ENGINES, SERVERS), WAIT_S, "connecting to all engines")
    wait_until(lambda: {ended() for _ in range(4 * SERVERS)} == {before}, WAIT_S, "the same figure again")


def test_serving_goes_on_without_the_coordinator(fleet: Server) -> None:
    [coordinator] = fleet.children("coordinator")
    coordinator.kill()
    assert sum(ask(fleet, 100)) == 100
    wait_until(
        lambda: fleet.children("coordinator") not in ([], [coordinator]), WAIT_S, "the coordinator's restart"
    )
    test_any_api_server_describes_the_whole_fleet(fleet)
    assert min(ask(fleet, 200)) > 0
