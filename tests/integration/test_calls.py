"""Operations on all engines of a real fleet: through any API server, over deaths and stalls, and sleep."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.clients import Streams, address_of
from tests.integration.server import SYNTHETIC, Server, client_of_each, wait_until

SERVERS, ENGINES = 2, 3
WAIT_S = 90
PACED = (*SYNTHETIC, "--synthetic-step-ms", "5", "--engine-hang-timeout", "0")
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
SHORT = BODY | {"max_tokens": 2}
FOREVER = BODY | {"max_tokens": 2000}

Clients = list[httpx.Client]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("calls")
    options = ("--api-server-count", str(SERVERS), "--data-parallel-size", str(ENGINES))
    with Server(
        *PACED, *options, "--profile-dir", str(directory / "profiles"), directory=directory
    ) as running:
        yield running


@pytest.fixture
def clients(fleet: Server) -> Iterator[Clients]:
    """One connection to each API server."""
    with client_of_each(fleet, SERVERS, WAIT_S) as found:
        yield found


def call(client: httpx.Client, path: str, key: str | None = None) -> dict[str, Any]:
    """The reply, with its status."""
    reply = client.post(path, headers={} if key is None else {"idempotency-key": key})
    body: dict[str, Any] = reply.json()
    return body | {"status": reply.status_code}


def of_all(body: dict[str, Any], field: str) -> list[Any]:
    assert [receipt["rank"] for receipt in body["engines"]] == list(range(ENGINES))
    return [receipt[field] for receipt in body["engines"]]


def engine_process(fleet: Server, rank: int) -> psutil.Process:
    [process] = [
        process for process in fleet.children("engine") if f"engine {rank}" in " ".join(process.cmdline())
    ]
    return process


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def asleep(fleet: Server) -> list[bool]:
    states = httpx.get(f"{fleet.url}/admin/engines", timeout=WAIT_S).raise_for_status().json()["engines"]
    return [state["asleep"] for state in states]


# -- exactly once


def test_an_operation_runs_once_per_engine_whichever_api_server_is_asked(clients: Clients) -> None:
    one, other = clients
    first = call(one, "/start_profile", "start")
    assert (first["status"], first["outcome"], first["failed"]) == (200, "done", [])
    again = call(other, "/start_profile", "start")
    assert again["status"] == 200
    for field in ("epoch", "step", "result"):
        assert of_all(again, field) == of_all(first, field)
    assert of_all(first, "repeated") == [False] * ENGINES
    assert of_all(again, "repeated") == [True] * ENGINES
    # had it run twice, the second would have found what the first began
    twice = call(other, "/start_profile")
    assert (twice["status"], twice["failed"]) == (502, [0, 1, 2])
    assert all("a profile is being recorded" in error for error in of_all(twice, "error"))
    written = call(one, "/stop_profile")
    assert written["status"] == 200
    paths = [Path(result["path"]) for result in of_all(written, "result")]
    assert len(set(paths)) == ENGINES
    assert all(path.stat().st_size for path in paths)


def test_a_key_stands_for_one_thing(clients: Clients) -> None:
    one, other = clients
    assert call(one, "/reset_prefix_cache", "thing")["status"] == 200
    reply = call(other, "/stop_profile", "thing")
    assert (reply["status"], reply["outcome"], reply["error"]["code"]) == (409, "conflict", "conflict")
    assert "was used for reset_prefix_cache, and cannot be used for stop_profile" in reply["error"]["message"]


def test_an_engine_that_stands_still_is_reported_and_runs_it_once(fleet: Server, clients: Clients) -> None:
    one, other = clients
    with stopped(engine_process(fleet, 1)):
        late = call(one, "/reset_prefix_cache?timeout=3", "still")
        assert (late["status"], late["outcome"], late["failed"]) == (504, "partial", [1])
        assert of_all(late, "error") == [None, "no answer within 3 s", None]
    done = call(other, "/reset_prefix_cache", "still")
    assert done["status"] == 200
    assert of_all(done, "repeated") == [True, True, True]


def test_an_engine_that_dies_meanwhile(fleet: Server, clients: Clients) -> None:
    (one, _) = clients
    victim = engine_process(fleet, 2)
    with stopped(victim), ThreadPoolExecutor(1) as pool:
        reply = pool.submit(call, one, "/reset_prefix_cache")
        victim.kill()
        body = reply.result(WAIT_S)
    # the process that comes after it has an empty cache, and is asked all the same
    assert body["status"] == 200, body
    assert of_all(body, "epoch")[:2] == [0, 0]
    assert of_all(body, "epoch")[2] > 0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/sleep?level=3", "level is '3', not 1 or 2."),
        ("/sleep?mode=keep", "mode is 'keep', not abort or wait."),
        ("/wake_up?tags=weights", "/wake_up takes timeout in its query, not 'tags'."),
        ("/sleep?level=1&level=2", "level is given twice."),
        ("/reset_prefix_cache?timeout=nan", "timeout is 'nan', not 1 to 3600 seconds."),
    ],
)
def test_bad_queries(fleet: Server, path: str, message: str) -> None:
    reply = fleet.post(path, {})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)


def test_bad_keys(fleet: Server) -> None:
    reply = fleet.post("/sleep", {}, **{"idempotency-key": "x" * 256})
    assert reply.status_code == 400
    assert "Idempotency-Key has 256 characters, 1 to 255" in reply.text


def test_profiles_need_a_directory(server: Server) -> None:
    reply = server.post("/start_profile", {})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_profile_dir")


def test_a_page_in_a_browser_does_not_put_a_server_to_sleep(server: Server) -> None:
    reply = server.post("/sleep", {}, origin="http://evil.example")
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "not_local")


# -- sleep


def refused(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", json=SHORT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "sleeping")
    assert reply.headers["retry-after"] == "1"


def served(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", json=SHORT)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 2


def is_sleeping(client: httpx.Client) -> bool:
    found: bool = client.get("/is_sleeping").json()["is_sleeping"]
    return found


def test_sleep_ends_streams_and_refuses_requests_until_it_is_woken(fleet: Server, clients: Clients) -> None:
    with Streams(fleet.url, [FOREVER | {"seed": seed} for seed in range(12)]) as streams:
        streams.until_each_has(1)
        body = call(clients[0], "/sleep")
        assert (body["status"], of_all(body, "result")) == (200, [{"level": 1}] * ENGINES)
        for client in clients:
            refused(client)
            assert is_sleeping(client)
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
        streams.until_all_ended()
        assert {code for code, _ in streams.failures} == {"sleeping"}
        assert len(streams.failures) == 12
    assert asleep(fleet) == [True] * ENGINES
    assert call(clients[1], "/wake_up")["status"] == 200
    for client in clients:
        served(client)
        assert not is_sleeping(client)


def test_sleep_may_wait_for_streams(fleet: Server, clients: Clients) -> None:
    bodies = [BODY | {"seed": seed} for seed in range(12)]
    with Streams(fleet.url, bodies) as streams, ThreadPoolExecutor(1) as pool:
        streams.until_each_has(1)
        reply = pool.submit(call, clients[0], "/sleep?mode=wait&timeout=300")
        streams.until_all_ended()
        assert streams.failures == []
        assert reply.result(WAIT_S)["status"] == 200
    refused(clients[1])
    assert call(clients[1], "/wake_up")["status"] == 200
    served(clients[0])


def test_streams_that_lose_their_engine_while_sleep_waits_end_like_new_requests(
    fleet: Server, clients: Clients
) -> None:
    """They would wait for an engine until --resume-timeout, which is longer than anybody waits here."""
    victim = engine_process(fleet, 1)
    with Streams(fleet.url, [FOREVER | {"seed": seed} for seed in range(12)]) as streams:
        streams.until_each_has(1)
        with stopped(victim), ThreadPoolExecutor(1) as pool:
            reply = pool.submit(call, clients[0], "/sleep?mode=wait&timeout=300")
            wait_until(lambda: all(map(is_sleeping, clients)), WAIT_S, "its beginning")
            victim.kill()
            streams.until_all_ended()
            assert {code for code, _ in streams.failures} == {"sleeping"}
            assert len(streams.failures) < 12  # those of the other engines were waited for
            assert reply.result(WAIT_S)["status"] == 200
    assert call(clients[1], "/wake_up")["status"] == 200
    for client in clients:
        served(client)


def test_one_engine_that_stands_still_keeps_all_awake(fleet: Server, clients: Clients) -> None:
    with stopped(engine_process(fleet, 0)):
        body = call(clients[0], "/sleep?timeout=3")
        assert (body["status"], body["outcome"]) == (504, "aborted")
        assert of_all(body, "error")[0] == "no answer within 3 s"
        assert of_all(body, "code") == ["timeout", "aborted", "aborted"]
    for client in clients:
        served(client)


def test_who_is_started_again_sleeps_as_well(fleet: Server, clients: Clients) -> None:
    assert call(clients[0], "/sleep?level=2")["status"] == 200
    fleet.kill(engine_process(fleet, 1))
    wait_until(lambda: len(fleet.children("engine")) == ENGINES, WAIT_S, "its successor")
    wait_until(lambda: asleep(fleet) == [True] * ENGINES, WAIT_S, "its sleep")
    victim = fleet.children("api-server")[0]
    before = {process.pid for process in fleet.children("api-server")}
    victim.kill()
    wait_until(
        lambda: len({process.pid for process in fleet.children("api-server")} - before) == 1, WAIT_S, "return"
    )
    with ThreadPoolExecutor(4) as pool:  # to any API server
        statuses = pool.map(lambda _: fleet.post("/v1/completions", SHORT).status_code, range(12))
        assert set(statuses) == {503}
    reply = fleet.post("/wake_up", {}, timeout=WAIT_S)
    assert reply.status_code == 200, reply.text
    wait_until(lambda: fleet.post("/v1/completions", SHORT).status_code == 200, WAIT_S, "service")


def test_who_is_asked_dies_in_the_middle(fleet: Server) -> None:
    """All sleep or all are awake in the end, whatever had been decided by then."""
    url = httpx.URL(fleet.url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=WAIT_S)
    # A connection that a server has accepted: one in the listener's queue would be served by a successor.
    connection.request("GET", "/health")
    assert connection.getresponse().read() is not None
    with contextlib.closing(connection), stopped(engine_process(fleet, 2)):
        connection.request("POST", "/sleep")
        fleet.kill(*fleet.children("api-server"))
        with pytest.raises(ConnectionError):
            connection.getresponse()
    wait_until(lambda: len(fleet.children("api-server")) == SERVERS, WAIT_S, "return")
    wait_until(lambda: len(set(settled(fleet))) == 1, WAIT_S, "agreement")
    # 409 while the call of the dead API server is still being ended.
    wait_until(lambda: fleet.post("/wake_up", {}, timeout=WAIT_S).status_code == 200, WAIT_S, "awaking")
    wait_until(lambda: fleet.post("/v1/completions", SHORT).status_code == 200, WAIT_S, "service")


def test_calls_that_wait_when_the_server_stops_are_told_so(tmp_path: Path) -> None:
    with (
        Server(*PACED, "--data-parallel-size", "2", "--drain-timeout", "1", directory=tmp_path) as alone,
        httpx.Client(base_url=alone.url, timeout=WAIT_S) as client,
        stopped(engine_process(alone, 1)),
        contextlib.ExitStack() as stack,
    ):
        asked = [
            stack.enter_context(
                contextlib.closing(http.client.HTTPConnection(*address_of(alone.url), WAIT_S))
            )
            for _ in range(2)
        ]
        for each, path in zip(asked, ("/reset_prefix_cache", "/sleep"), strict=True):
            each.request("GET", "/health")  # it is accepted, and read before what comes later on another one
            assert each.getresponse().read() is not None
            each.request("POST", path)
        wait_until(lambda: is_sleeping(client), WAIT_S, "its beginning")
        alone.process.send_signal(signal.SIGTERM)
        for reply in (each.getresponse() for each in asked):
            assert (reply.status, json.loads(reply.read())["error"]["code"]) == (503, "server_stopped")
            assert reply.headers["x-request-begun"] == "true"


def settled(fleet: Server) -> list[object]:
    """Of each engine whether it sleeps, and something of its own while it is away."""
    try:
        states = httpx.get(f"{fleet.url}/admin/engines", timeout=WAIT_S).json()["engines"]
    except httpx.HTTPError:
        return [None, 0]
    return [state["asleep"] if state["up"] else state["rank"] for state in states]


def test_a_model_sleeps_and_wakes_as_it_was(tiny_llama: Server) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True}

    def text() -> str:
        reply = tiny_llama.post("/v1/completions", body, timeout=WAIT_S)
        assert reply.status_code == 200, reply.text
        made: str = reply.json()["choices"][0]["text"]
        return made

    before = text()
    for level in (1, 2):
        assert tiny_llama.post(f"/sleep?level={level}", {}, timeout=WAIT_S).status_code == 200
        assert tiny_llama.post("/v1/completions", body).status_code == 503
        assert tiny_llama.post("/wake_up", {}, timeout=WAIT_S).status_code == 200
        assert text() == before
    assert tiny_llama.post("/reset_prefix_cache", {}, timeout=WAIT_S).status_code == 200
    assert text() == before
