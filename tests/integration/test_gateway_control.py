"""Operations on all servers through a gateway: once on each engine, over deaths, and before they serve."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.gateway.processes import WAIT_S, Call, Gateway, Upstream, closed_port, eventually, gateway
from tests.gateway.test_models import listing
from tests.integration.control import PACED, SHORT, call, served, stopped
from tests.integration.server import Server
from tests.integration.weight_marks import TOLD, WeightFiles, marks_of

ENGINES = 2
FLEET = (*PACED, "--data-parallel-size", str(ENGINES))
JSON = {"content-type": "application/json"}
OPTIONS = ("--workers", "2", "--allow-loopback-admin", "--scrape-interval", "0.1")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Server(*FLEET, directory=tmp_path_factory.mktemp("serve"))) for _ in range(2)
        ]


@pytest.fixture(scope="module")
def front(servers: list[Server]) -> Iterator[Gateway]:
    with gateway(*(each.url for each in servers), options=OPTIONS) as running:
        yield running


@pytest.fixture
def files(tmp_path: Path) -> WeightFiles:
    return WeightFiles(tmp_path)


@contextlib.contextmanager
def client_of_each_worker(front: Gateway) -> Iterator[list[httpx.Client]]:
    """A connection to each worker."""
    with contextlib.ExitStack() as stack:
        found: dict[int, httpx.Client] = {}

        def one_more() -> bool:
            client = stack.enter_context(httpx.Client(base_url=front.url, timeout=WAIT_S))
            client.get("/health").raise_for_status()
            pool: Any = client._transport
            [connection] = pool._pool.connections
            stream = connection._connection._network_stream
            port = stream.get_extra_info("client_addr")[1]
            for worker in front.workers:
                if any(each.raddr and each.raddr.port == port for each in worker.net_connections("tcp")):
                    found.setdefault(worker.pid, client)
            return len(found) == 2

        eventually(one_more)
        yield list(found.values())


def update(client: httpx.Client, path: str, version: str, key: str | None = None) -> dict[str, Any]:
    return call(client, "/update_weights", {"path": path, "weight_version": version}, key)


def receipts(reply: dict[str, Any], field: str) -> list[list[Any]]:
    return [[engine[field] for engine in each["engines"]] for each in reply["endpoints"]]


def outcomes(reply: dict[str, Any]) -> list[str]:
    return [each["outcome"] for each in reply["endpoints"]]


def versions(server: Server) -> list[str]:
    return [each["weight_version"] for each in server.get("/weight_version").json()["engines"]]


def held(front: Gateway) -> dict[str, float]:
    return front.counts("endpoint_held")


def test_each_mode_reaches_each_engine_once(front: Gateway, servers: list[Server]) -> None:
    with client_of_each_worker(front) as (one, other):
        for number, mode in enumerate(("abort", "wait", "keep")):
            paused = call(one, f"/pause?mode={mode}", key=f"pause-{number}")
            assert (paused["status"], paused["outcome"], paused["settled"]) == (200, "done", True), paused
            assert receipts(paused, "repeated") == [[False] * ENGINES] * 2
            assert [each.get("/is_paused").json() for each in servers] == [{"is_paused": True}] * 2
            again = call(other, f"/pause?mode={mode}", key=f"pause-{number}")
            assert (again["status"], receipts(again, "repeated")) == (200, [[True] * ENGINES] * 2), again
            shown = other.get("/is_paused").json()
            assert [each["result"] for each in shown["endpoints"]] == [{"is_paused": True}] * 2
            resumed = call(other, "/resume")
            assert (resumed["status"], outcomes(resumed)) == (200, ["done"] * 2)
        used = call(one, "/pause?mode=keep", key="pause-0")
        assert (used["status"], used["outcome"]) == (409, "conflict")
        assert one.post("/v1/completions", json=SHORT).status_code == 200


def completes(client: httpx.Client) -> tuple[int, str | None]:
    reply = client.post("/v1/completions", json=SHORT)
    return reply.status_code, reply.json()["error"]["code"] if reply.status_code != 200 else None


def test_servers_that_go_on_get_requests_at_once_from_every_worker(
    front: Gateway, servers: list[Server]
) -> None:
    with client_of_each_worker(front) as clients:
        for close, phase, reopen in (("/pause", "paused", "/resume"), ("/sleep", "sleeping", "/wake_up")):
            assert call(clients[0], close)["status"] == 200
            for client in clients:
                ready = client.get("/ready")
                assert (ready.status_code, ready.json()["phase"]) == (503, phase), ready.text
                assert (ready.json()["model_servers_ready"], ready.json()["model_servers"]) == (0, 2)
                assert ready.json()["error"]["code"] == phase
                assert completes(client) == (503, phase)
                # at once, or after a refusal more if that was so long ago that the server is asked again
                eventually(lambda client=client: completes(client) == (503, "backing_off"))  # type: ignore[misc]
            assert call(clients[1], reopen)["status"] == 200
            for client in clients:
                assert client.get("/ready").json() | {"model_servers_ready": 2} == client.get("/ready").json()
                assert client.get("/ready").status_code == 200
                assert completes(client) == (200, None)


def readiness(client: httpx.Client) -> tuple[int, int]:
    reply = client.get("/ready")
    return reply.status_code, reply.json()["model_servers_ready"]


@pytest.mark.parametrize(("close", "reopen"), [("/pause", "/resume"), ("/sleep", "/wake_up")])
def test_a_server_that_was_opened_directly_makes_the_gateway_ready(
    front: Gateway, servers: list[Server], close: str, reopen: str
) -> None:
    """No request need come first: a load balancer sends none until then."""
    with client_of_each_worker(front) as clients:
        assert call(clients[0], close)["status"] == 200
        assert [completes(client)[0] for client in clients] == [503, 503]
        assert servers[0].post(reopen, {}).status_code == 200
        for client in clients:
            eventually(lambda client=client: readiness(client) == (200, 1))  # type: ignore[misc]
            assert completes(client) == (200, None)
        assert servers[0].post(close, {}).status_code == 200
        for client in clients:
            eventually(lambda client=client: readiness(client) == (503, 0))  # type: ignore[misc]
        assert call(clients[0], reopen)["status"] == 200
        assert [readiness(client) for client in clients] == [(200, 2), (200, 2)]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/pause", b'{"mode": "keep", "mode": "abort"}', "mode"),
        ("/resume", b'{"timeout": 5, "timeout": 6}', "timeout"),
        ("/sleep", b'{"level":1,"mode":"abort","level":2}', "level"),
        ("/wake_up", b'{"timeout": 5, "timeout": 5}', "timeout"),
        ("/flush_cache", b'{"timeout": 5, "timeout": 6}', "timeout"),
        ("/abort_requests", b'{"prefix": "none", "prefix": "nobody"}', "prefix"),
        ("/update_weights", b'{"weight_version": "a", "path": "/", "weight_version": "b"}', "weight_version"),
    ],
)
def test_a_field_that_is_given_twice(
    front: Gateway, servers: list[Server], path: str, body: bytes, field: str
) -> None:
    for url in (front.url, servers[0].url):
        reply = httpx.post(f"{url}{path}", content=body, headers=JSON, timeout=WAIT_S)
        error = reply.json()["error"]
        assert (reply.status_code, error["message"], error["param"]) == (
            400,
            f"{field} is given twice.",
            field,
        )


def test_two_keys(front: Gateway, servers: list[Server]) -> None:
    for url in (front.url, servers[0].url):
        keys = [("idempotency-key", "a"), ("idempotency-key", "b")]
        reply = httpx.post(f"{url}/pause", headers=keys, timeout=WAIT_S)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == "The header 'idempotency-key' is given more than once."


def test_a_pool_where_there_are_none(front: Gateway) -> None:
    refused = call(front.client, "/resume?pool=x")
    assert (refused["status"], refused["error"]["message"]) == (400, "pool 'x': there are no pools.")


def test_the_mode_of_a_pause_may_be_in_the_body(front: Gateway, servers: list[Server]) -> None:
    assert call(front.client, "/pause", {"mode": "keep"})["status"] == 200
    assert front.client.get("/ready").status_code == 200, "requests wait in the queue"
    for server in servers:
        assert (server.get("/is_paused").json(), server.get("/ready").status_code) == (
            {"is_paused": True},
            200,
        )
    for body, message in (
        ({"mode": "keep", "pool": "", "modus": 1}, "takes mode, timeout in its query, not 'modus'."),
        ({"mode": "later"}, "mode is 'later', not abort, wait or keep."),
        ({"mode": {}}, "mode: expected an integer"),
        ({"model": 7}, "model '7': the models are"),
    ):
        refused = call(front.client, "/pause", body)
        assert (refused["status"], message in refused["error"]["message"]) == (400, True), refused
    differ = call(front.client, "/pause?mode=abort", {"mode": "keep"})
    assert (differ["status"], differ["error"]["param"]) == (400, "mode")
    assert call(front.client, "/resume", {"timeout": 60})["status"] == 200


def test_operations_without_a_state(front: Gateway) -> None:
    aborted = call(front.client, "/abort_requests", {"all": True}, "all")
    assert (aborted["status"], aborted["aborted"], outcomes(aborted)) == (200, 0, ["done"] * 2)
    flushed = call(front.client, "/flush_cache", key="flush")
    assert receipts(flushed, "repeated") == [[False] * ENGINES] * 2
    assert receipts(call(front.client, "/flush_cache", key="flush"), "repeated") == [[True] * ENGINES] * 2
    used = call(front.client, "/reset_prefix_cache", key="all")
    assert (used["status"], used["outcome"]) == (409, "conflict")
    shown = front.client.get("/weights_checksum").json()
    assert (shown["outcome"], shown["equal"]) == ("done", True)
    refused = call(front.client, "/pause?mode=later")
    assert (refused["status"], refused["outcome"], refused["settled"]) == (400, "refused", False)
    assert "mode is 'later', not" in refused["error"]["message"]
    unknown = call(front.client, "/pause?model=nobody")
    assert (unknown["status"], unknown["error"]["param"]) == (400, "model")
    manifest = {"names": ["version"], "dtypes": ["uint8"], "shapes": [[1]]}
    for field, value in (("broadcast", manifest), ("update_info", {"names": []})):
        sent = call(front.client, "/update_weights", {field: value, "weight_version": "b"})
        assert (sent["status"], sent["error"]["param"]) == (400, field)
    assert front.client.get("/pause").status_code == 405
    other = call(front.client, "/pause_generation", {"mode": "in_place"})
    assert (other["status"], other["error"]["code"]) == (403, "administrative")
    assert 'POST /pause_generation. Here it is POST /pause {"mode": …}' in other["error"]["message"]


@pytest.mark.parametrize("how", ["gone", "replaced"])
def test_a_server_that_was_away_gets_it_before_it_serves(
    servers: list[Server], files: WeightFiles, tmp_path: Path, how: str
) -> None:
    kept, (path, later), version = servers[0], (files.make(5), files.make(6)), f"{how}-6"
    with Server(*FLEET, directory=tmp_path) as first:
        port = first.url.rpartition(":")[2]
        with gateway(kept.url, first.url, options=OPTIONS) as front:
            assert update(front.client, path, f"{how}-5", f"{how}-five")["outcome"] == "done"
            first.end()
            reply = update(front.client, later, version, version)
            assert (reply["status"], reply["outcome"], reply["settled"]) == (502, "partial", True), reply
            assert outcomes(reply) == ["done", "unreachable"]
            assert reply["failed"] == [first.url]
            again = update(front.client, later, version, version)
            assert (outcomes(again), again["settled"]) == (["done", "unreachable"], True)
            eventually(lambda: any(first.url in key for key in held(front)))
            away = Path(later).rename(tmp_path / "away")
            if how == "replaced":
                Path(files.make(7)).rename(later)
            with Server(*FLEET, "--port", port, directory=tmp_path) as second:
                # it is there, and cannot get the weights
                eventually(lambda: held(front) == {f"{first.url},weights not taken": 1.0})
                choices = [served(front.client, **TOLD) for _ in range(40)]
                assert [marks_of(each) for each in choices] == [{version: {6}}] * 40
                assert second.metric("vllm:request_success_total") == 0
                assert versions(second) == ["default"] * ENGINES
                away.rename(later)
                eventually(lambda: not held(front))
                assert versions(second) == [version] * ENGINES

                def serves() -> bool:
                    assert marks_of(served(front.client, **TOLD)) == {version: {6}}
                    return second.metric("vllm:request_success_total") > 0

                eventually(serves)
                shown = front.client.get("/weights_checksum").json()
                assert (shown["outcome"], shown["equal"]) == ("done", True)


def test_a_worker_is_killed_in_the_middle(front: Gateway, servers: list[Server], files: WeightFiles) -> None:
    path = files.make(9)
    engines = [process for server in servers for process in server.children("engine")]
    with client_of_each_worker(front) as (one, _), contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(stopped(engine))
        port = one_port(one)
        [victim] = [worker for worker in front.workers if has_connection(worker, port)]
        asked = threading.Thread(target=lost, args=(one, path))
        asked.start()
        for server in servers:
            eventually(lambda server=server: not server.get("/weight_version").json()["settled"])  # type: ignore[misc]
        victim.kill()
        asked.join()
    eventually(lambda: [versions(each) for each in servers] == [["v9"] * ENGINES] * 2)
    again = update(front.client, path, "v9", "nine")
    assert (again["status"], again["settled"]) == (200, True), again
    assert receipts(again, "repeated") == [[True] * ENGINES] * 2


def one_port(client: httpx.Client) -> int:
    pool: Any = client._transport
    [connection] = pool._pool.connections
    port: int = connection._connection._network_stream.get_extra_info("client_addr")[1]
    return port


def has_connection(worker: psutil.Process, port: int) -> bool:
    return any(each.raddr and each.raddr.port == port for each in worker.net_connections("tcp"))


def lost(client: httpx.Client, path: str) -> None:
    with pytest.raises(httpx.HTTPError):
        update(client, path, "v9", "nine")


def test_a_foreign_server_is_named_and_served(servers: list[Server]) -> None:
    def behave(call: Call) -> None:
        call.reply(404 if call.path != "/v1/completions" else 200, b"{}")

    with Upstream(behave) as foreign, gateway(servers[0].url, foreign, options=OPTIONS) as front:
        paused = call(front.client, "/pause?mode=abort")
        assert (paused["status"], paused["unsupported"]) == (200, [foreign.url]), paused
        assert outcomes(paused) == ["done", "unsupported"]
        assert not any(foreign.url in key for key in held(front))
        eventually(lambda: front.client.post("/v1/completions", json=SHORT).status_code == 200)
        assert call(front.client, "/resume")["status"] == 200
    with Upstream(behave) as foreign, gateway(foreign, options=OPTIONS) as front:
        alone = call(front.client, "/pause")
        assert (alone["status"], alone["outcome"], alone["settled"]) == (501, "unsupported", False)


def test_a_model_that_the_named_pool_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"

    def behave(call: Call) -> None:
        call.reply(200, b'{"outcome": "done", "engines": []}')

    with Upstream(behave) as large, Upstream(behave) as little:
        large.on_models, little.on_models = listing("large"), listing("little")
        path.write_text(
            f"pools:\n- name: big\n  endpoints: [{large.url}]\n- name: small\n  endpoints: [{little.url}]\n"
        )
        with gateway(options=(*OPTIONS, "--endpoints-file", str(path))) as front:
            eventually(lambda: call(front.client, "/pause?pool=small&model=little")["status"] == 200)
            refused = call(front.client, "/pause?pool=big&model=little")
            assert (refused["status"], refused["error"]["param"]) == (400, "model"), refused
            assert refused["error"]["message"] == "model 'little': those of pool 'big' are large."
            assert call(front.client, "/pause?pool=big&model=large")["status"] == 200


@pytest.mark.parametrize(
    ("keys", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        ({"authorization": "Bearer client"}, 403, "not_admin"),
        ({"authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ({"authorization": "Bearer admin"}, 200, None),
    ],
    ids=["none", "client", "wrong", "admin"],
)
def test_only_administrators_control(
    secured: Gateway, keys: dict[str, str], status: int, code: str | None
) -> None:
    reply = secured.client.post("/resume", headers=keys)
    assert reply.status_code == status, reply.text
    if code is not None:
        assert reply.json()["error"]["code"] == code


@pytest.fixture(scope="module")
def secured(servers: list[Server]) -> Iterator[Gateway]:
    options = ("--api-key", "client", "--admin-api-key", "admin")
    with gateway(servers[0].url, options=options) as running:
        yield running


def test_keys_of_clients_alone_open_nothing(servers: list[Server]) -> None:
    with gateway(servers[0].url, options=("--api-key", "client", "--allow-loopback-admin")) as front:
        reply = front.client.post("/resume", headers={"authorization": "Bearer client"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "not_admin")


def test_servers_that_cannot_be_reached(tmp_path: Path) -> None:
    with gateway(closed_port(), options=OPTIONS) as front:
        reply = call(front.client, "/pause", key="p")
        assert (reply["status"], reply["outcome"], reply["settled"]) == (502, "partial", False), reply
        assert outcomes(reply) == ["unreachable"]


def test_a_server_that_knows_the_key_and_was_changed_since() -> None:
    """It would not carry out the call again: it gets a key that follows from the first."""
    seen: set[str] = set()
    paused: list[bool] = [False]

    def behave(call: Call) -> None:
        if call.path == "/is_paused":
            call.reply(200, b'{"is_paused": %s}' % (b"true" if paused[0] else b"false"))
        elif call.path == "/pause":
            paused[0] = paused[0] or call.headers["idempotency-key"] not in seen
            seen.add(call.headers["idempotency-key"])
            call.reply(200, b'{"outcome": "done", "engines": []}')
        else:
            call.reply(404, b"{}")

    with Upstream(behave) as server, gateway(server, options=OPTIONS) as front:
        assert call(front.client, "/pause", key="once")["settled"] is True
        assert seen == {"once"}
        paused[0] = False
        works, server.on_metrics = server.on_metrics, Call.reset
        eventually(lambda: bool(held(front)))
        server.on_metrics = works
        eventually(lambda: not held(front))
        assert paused[0]
        [derived] = seen - {"once"}
        assert derived.endswith("-1-1")
