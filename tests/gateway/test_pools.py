"""Vendors' APIs and own servers behind one gateway: whatever happens, each gets its own key alone."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import OpenAI

from tests.certificates import Certificates
from tests.gateway.behaviours import good as answers
from tests.gateway.processes import Behaviour, Call, Gateway, Upstream, eventually, gateway
from tests.integration.server import SYNTHETIC, Server

CLIENT, OWN, FIRST, SECOND, THIRD = (f"sk-{each}" for each in ("client", "own", "first", "second", "third"))
SERVED = "sk-served"
UNUSED = "sk-unused"
METRICS = b"vllm:num_requests_waiting 0\n"
KEYS = (CLIENT, OWN, FIRST, SECOND, THIRD, SERVED, UNUSED)


def good(call: Call) -> None:
    """It knows no other routes."""
    if call.path.partition("?")[0].endswith("/completions"):
        answers(call)
    else:
        call.reply(404, b"{}")


def refusing(call: Call) -> None:
    call.reply(429, b"{}")


def denying(call: Call) -> None:
    call.reply(401, b'{"error":{"message":"no such key"}}')


def broken(call: Call) -> None:
    call.reset()


def keys_in(call: Call) -> set[str]:
    """Keys anywhere in a request."""
    text = f"{call.path}\n{call.headers}\n{call.body!r}"
    return {key for key in KEYS if key in text}


@dataclass
class Fleet:
    """A gateway before own servers, and two vendors that want certificates."""

    front: Gateway
    own: Upstream
    plain: Upstream
    """Of no pool: it gets the keys of clients."""
    openai: Upstream
    azure: Upstream
    served: str
    """URL of a server of Penstock that wants a key."""
    key_file: Path

    def ask(self, model: str, path: str = "/v1/chat/completions") -> int:
        reply = self.front.client.post(
            path,
            json={"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
            headers={"authorization": f"Bearer {CLIENT}", "x-api-key": CLIENT, "cookie": f"key={CLIENT}"},
        )
        return reply.status_code

    def check_keys(self) -> None:
        """No request at any server, of clients or the gateway's own, has ever had another's key."""
        for server, allowed in (
            (self.own, {OWN}),
            (self.plain, {CLIENT}),
            (self.openai, {FIRST, THIRD}),
            (self.azure, {SECOND}),
        ):
            assert {key for call in server.seen for key in keys_in(call)} <= allowed


@pytest.fixture(scope="module")
def fleet(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("pools")
    locked = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    locked.load_cert_chain(certificates.both)
    locked.load_verify_locations(certificates.authority)
    locked.verify_mode = ssl.CERT_REQUIRED
    key_file, file = folder / "first.key", folder / "endpoints.yaml"
    key_file.write_text(f"{FIRST}\n")
    (folder / "second.key").write_text(SECOND)
    starting = Server(*SYNTHETIC, directory=folder, environ=os.environ | {"PENSTOCK_API_KEY": SERVED})
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(starting)
        own, plain = (stack.enter_context(Upstream(good)) for _ in range(2))
        openai, azure = (stack.enter_context(Upstream(good, tls=locked)) for _ in range(2))
        for server, model in ((own, "own"), (plain, "plain")):
            listing = msgspec.json.encode({"data": [{"id": model}]})
            server.on_models = lambda call, listing=listing: call.reply(200, listing)
        tls = {"ca-file": certificates.authority, "cert-file": certificates.both}
        hosted = {"hosted": True, "tls": tls, "http2": "off"}
        pools = [
            {
                "name": "own",
                "endpoints": [own.url],
                "fallback": ["openai"],
                "overflow": {"waiting": 8},
                "key": {"env": "PENS_OWN"},
            },
            {
                "name": "openai",
                "endpoints": [f"{openai.url}/api/v1"],
                "models": ["gpt"],
                "fallback": ["azure", "own"],
                "key": {"file": str(key_file)},
                "headers": {"openai-organization": "org"},
                "max-attempts": 1,
                **hosted,
            },
            {
                "name": "azure",
                "endpoints": [f"{azure.url}/openai/deployments/gpt"],
                "models": ["azure-gpt"],
                "key": {"file": str(folder / "second.key"), "header": "api-key"},
                "query": {"api-version": "2024-10-21"},
                "timeouts": {"first-token": 1},
                "apis": ["chat"],
                **hosted,
            },
            {"name": "served", "endpoints": [served.url], "key": {"env": "PENS_SERVED"}},
            {"name": "plain", "endpoints": [plain.url], "key": "client"},
        ]
        models = {"other": {"targets": "own", "shadow": {"azure": 1}}}
        file.write_bytes(msgspec.json.encode({"pools": pools, "models": models}))
        options = ("--endpoints-file", str(file), "--scrape-interval", "0.1", "--models-interval", "0.2")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PENS_OWN", OWN)
            patch.setenv("PENS_SERVED", SERVED)
            front = stack.enter_context(
                gateway(options=(*options, "--allow-loopback-admin", "--endpoint-api-key", UNUSED))
            )
        yield Fleet(front, own, plain, openai, azure, served.url, key_file)


@pytest.fixture
def servers(fleet: Fleet) -> Iterator[Fleet]:
    """All of them well, before and after."""
    yield fleet
    for server in (fleet.own, fleet.plain, fleet.openai, fleet.azure):
        server.behaviour, server.metrics = good, METRICS
    eventually(lambda: all(fleet.ask(model) == 200 for model in ("own", "plain", "gpt", "azure-gpt")))
    fleet.check_keys()


def test_each_server_gets_its_own_key_where_it_wants_it(servers: Fleet) -> None:
    for model in ("own", "plain", "gpt", "azure-gpt"):
        assert servers.ask(model) == 200
    own, plain, openai, azure = (
        server.calls[-1] for server in (servers.own, servers.plain, servers.openai, servers.azure)
    )
    assert (own.path, own.headers["authorization"]) == ("/v1/chat/completions", f"Bearer {OWN}")
    assert plain.headers["x-api-key"] == CLIENT
    assert plain.headers["cookie"] == f"key={CLIENT}"
    assert (openai.path, openai.headers["authorization"]) == ("/api/v1/chat/completions", f"Bearer {FIRST}")
    assert openai.headers["openai-organization"] == "org"
    assert azure.path == "/openai/deployments/gpt/chat/completions?api-version=2024-10-21"
    assert azure.headers["api-key"] == SECOND
    assert "authorization" not in azure.headers
    assert not {"openai-organization", "cookie", "x-api-key"} & azure.headers.keys()


def test_a_server_of_our_own_that_wants_its_key(servers: Fleet) -> None:
    """Over HTTP/2. It refuses others, to requests as to readings of models and metrics."""
    listed = [model["id"] for model in servers.front.client.get("/v1/models").json()["data"]]
    (model,) = set(listed) - {"own", "plain", "gpt", "azure-gpt", "other"}
    assert servers.ask(model) == 200
    eventually(lambda: "speaks HTTP/2" in "".join(servers.front.lines))
    refusals = ("denies the gateway", "refuses the key", "with status 401")
    said = [line for line in servers.front.lines if servers.served in line]
    assert not [line for line in said if any(refusal in line for refusal in refusals)]


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_a_websocket_to_a_server_of_our_own(servers: Fleet) -> None:
    """OpenAI's client; responses that are not stored are continued, prepared and cancelled."""
    listed = [model["id"] for model in servers.front.client.get("/v1/models").json()["data"]]
    (model,) = set(listed) - {"own", "plain", "gpt", "azure-gpt", "other"}
    url = f"{servers.front.url}/v1"
    fields: dict[str, Any] = {"model": model, "store": False}

    def until(connection: Any, end: str) -> Any:
        for event in connection:
            assert event.type != "error", event
            if event.type == end:
                return event
        raise AssertionError("the connection has ended")

    with (
        OpenAI(base_url=url, api_key=CLIENT, max_retries=0) as client,
        client.responses.connect(extra_headers={"x-request-id": "agent"}) as connection,
    ):
        connection.send({"type": "response.create", "generate": False, "input": "hello", **fields})
        last = until(connection, "response.completed").response
        for text in ("more", "again"):
            connection.response.create(
                input=text, previous_response_id=last.id, max_output_tokens=20, **fields
            )
            before, last = last, until(connection, "response.incomplete").response
            assert last.previous_response_id == before.id
            assert last.usage.input_tokens > before.usage.input_tokens
        connection.response.create(input="long", max_output_tokens=1000, **fields)
        until(connection, "response.output_text.delta")
        connection.send({"type": "response.cancel"})
        assert until(connection, "response.incomplete").response.usage.output_tokens < 1000
    lines = [line for line in servers.front.lines if '"request_id": "agent.' in line]
    eventually(lambda: sum('"request_id": "agent.' in line for line in servers.front.lines) == 4)
    assert not [line for line in lines if '"outcome": "ok"' not in line]


def test_what_the_gateway_asks_for_itself(servers: Fleet) -> None:
    """Scrapes and listings go with the key of the pool; hosted APIs have no metrics."""
    for server, path in (
        (servers.own, "/metrics"),
        (servers.own, "/v1/models"),
        (servers.openai, "/api/v1/models"),
        (servers.azure, "/openai/deployments/gpt/models?api-version=2024-10-21"),
    ):
        eventually(lambda server=server, path=path: any(call.path == path for call in server.seen))
    assert not [call for call in servers.openai.seen + servers.azure.seen if "metrics" in call.path]
    asked = servers.front.client.get("/is_sleeping", params={"pool": "azure"})
    assert (asked.status_code, "pool 'azure': the pools are" in asked.text) == (400, True)
    servers.front.client.get("/is_sleeping", params={"pool": "own"})
    assert [call.path for call in servers.own.calls][-1] == "/is_sleeping"
    assert not [line for line in servers.front.lines if "reports no load" in line and "https" in line]
    response = servers.front.client.get("/v1/responses/resp_1", headers={"authorization": f"Bearer {CLIENT}"})
    assert response.status_code == 404
    for each in (servers.own, servers.plain, servers.openai):
        assert [call for call in each.seen if "resp_1" in call.path]
    assert not [call for call in servers.azure.seen if "resp_1" in call.path], "it does not speak that API"
    servers.openai.behaviour = denying
    response = servers.front.client.get("/v1/responses/resp_2", headers={"authorization": f"Bearer {CLIENT}"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "owner_unavailable")


def model_of(server: Upstream) -> str:
    """The model of the latest request that a client has caused."""
    call = next(call for call in reversed(server.calls) if "completions" in call.path)
    return str(call.json["model"])


@pytest.mark.parametrize(("behaviour", "status"), [(refusing, 200), (denying, 200), (broken, 502)])
def test_fallback_both_ways(servers: Fleet, behaviour: Behaviour, status: int) -> None:
    servers.own.behaviour = refusing
    assert servers.ask("own") == 200
    assert model_of(servers.openai) == "gpt"
    servers.own.behaviour = good
    servers.openai.behaviour = denying if behaviour is denying else refusing
    servers.azure.behaviour = behaviour
    assert servers.ask("gpt") == status
    assert model_of(servers.azure) == "azure-gpt"
    if status == 200:
        assert model_of(servers.own) == "own"


def test_overflow_while_requests_wait(servers: Fleet) -> None:
    def goes_to(server: Upstream) -> bool:
        before = len(server.calls)
        assert servers.ask("own") == 200
        return len(server.calls) > before

    assert goes_to(servers.own)
    servers.own.metrics = b"vllm:num_requests_waiting 9\n"
    eventually(lambda: goes_to(servers.openai))
    assert not goes_to(servers.own)
    servers.openai.behaviour = servers.azure.behaviour = refusing
    assert goes_to(servers.own), "which takes what nobody else does"
    servers.openai.behaviour = servers.azure.behaviour = good
    servers.own.metrics = b"vllm:num_requests_waiting 8\n"
    eventually(lambda: goes_to(servers.own))


def test_a_denied_key_is_named(servers: Fleet) -> None:
    servers.azure.behaviour = denying
    reply = servers.front.client.post("/v1/chat/completions", json={"model": "azure-gpt", "messages": []})
    assert reply.status_code == 502
    assert "refuses the key of pool azure (key.file " in reply.json()["error"]["message"]
    assert SECOND not in "".join(servers.front.lines)


def test_copies_have_the_key_of_where_they_go(servers: Fleet) -> None:
    before = len(servers.azure.calls)
    assert servers.ask("other") == 200
    eventually(lambda: any("x-penstock-shadow" in call.headers for call in servers.azure.calls[before:]))


def test_a_key_file_that_changes(servers: Fleet) -> None:
    rotated = servers.key_file.with_suffix(".new")
    rotated.write_text("two words\n")
    rotated.replace(servers.key_file)
    eventually(lambda: "its contents stay in effect" in "".join(servers.front.lines))
    assert "two words" not in "".join(servers.front.lines)
    rotated.write_text(f"{THIRD}\n")
    rotated.replace(servers.key_file)

    def is_rotated() -> bool:
        assert servers.ask("gpt") == 200
        return servers.openai.calls[-1].headers["authorization"] == f"Bearer {THIRD}"

    eventually(is_rotated)


def test_time_outs_of_a_pool(servers: Fleet) -> None:
    servers.azure.behaviour = lambda call: call.wait_until_gone()
    reply = servers.front.client.post("/v1/chat/completions", json={"model": "azure-gpt", "messages": []})
    assert reply.status_code == 504
    assert "within 1 s" in reply.json()["error"]["message"]
