"""Requests for vectors through a real gateway: relayed as they are, counted, paid for, sent once more."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.gateway.model_server import model_server
from tests.gateway.processes import WAIT_S, Behaviour, Call, Gateway, Upstream, eventually, gateway
from tests.gateway.test_flow_control import logged
from tests.gateway.test_uploads import peak, resident

MIB = 1 << 20
KEYS = """
keys:
  - {name: free, key: sk-free}
  - {name: metered, key: sk-metered, models: [m], priority: -2, budgets: {tokens-per-day: 1000}}
"""
USAGE = b'"usage":{"prompt_tokens":5,"total_tokens":5}}'
REPLY = b'{"object":"list","data":[{"index":0,"embedding":[0.5,-0.25]}],"model":"m",' + USAGE
TEXT = {"model": "m", "input": "some text"}
SEARCH = {"model": "m", "query": "q", "documents": ["a", "b"]}
COHERE = b'{"id":"c","embeddings":{"float":[[0.5]]},"texts":["a"],"meta":{"billed_units":{"input_tokens":5}}}'
ROUTES = {
    "/v1/embeddings": (TEXT, REPLY),
    "/v1/rerank": (SEARCH, b'{"id":"r","model":"m",' + USAGE[:-1] + b',"results":[{"index":0}]}'),
    "/rerank": (SEARCH, b'{"results":[],' + USAGE),
    "/v2/rerank": (SEARCH, b'{"id":"c","results":[],"meta":{"tokens":{"input_tokens":5}}}'),
    "/score": ({"model": "m", "text_1": "a", "text_2": "b"}, b'{"data":[{"score":0.5}],' + USAGE),
    "/v1/classify": (TEXT, b'{"data":[{"label":"x","probs":[0.5]}],' + USAGE),
    "/pooling": (TEXT, b'{"data":[[0.5]],' + USAGE),
    "/v2/embed": ({"model": "m", "texts": ["a"], "input_type": "search_query"}, COHERE),
    "/api/embed": (TEXT, b'{"model":"m","embeddings":[[0.5]],"prompt_eval_count":5}'),
    "/v1beta/models/m:embedContent": (
        {"content": {"parts": [{"text": "a"}]}},
        b'{"embedding":{"values":[0.5]},"usageMetadata":{"promptTokenCount":5}}',
    ),
}
"""A request of each API, and a reply that counts five tokens."""


class Servers:
    """Two model servers that behave alike."""

    def __init__(self) -> None:
        self.first, self.second = Upstream(self._behave), Upstream(self._behave)
        self.behaviour: Behaviour = lambda call: call.reply(200, REPLY)

    def _behave(self, call: Call) -> None:
        self.behaviour(call)

    @property
    def calls(self) -> list[Call]:
        return self.first.calls + self.second.calls

    def clear(self) -> None:
        self.first.calls.clear()
        self.second.calls.clear()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    made = Servers()
    with made.first, made.second:
        yield made


@pytest.fixture(scope="module")
def bills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bills") / "bills.jsonl"


@pytest.fixture(scope="module")
def front(servers: Servers, bills: Path) -> Iterator[Gateway]:
    endpoints, keys = bills.parent / "endpoints.yaml", bills.parent / "keys.yaml"
    endpoints.write_text(
        f"endpoints: [{servers.first.url}, {servers.second.url}]\n"
        "currency: USD\nmodels: {m: {prices: {input: 0.1, output: 0}}}\n"
    )
    keys.write_text(KEYS)
    keys.chmod(0o600)
    options = (
        "--endpoints-file",
        str(endpoints),
        "--client-keys-file",
        str(keys),
        "--billing-file",
        str(bills),
    )
    with gateway(options=options) as made:
        made.client.headers["authorization"] = "Bearer sk-free"
        yield made


@pytest.fixture(autouse=True)
def anew(servers: Servers) -> None:
    servers.clear()
    servers.behaviour = lambda call: call.reply(200, REPLY)


def entry_of(front: Gateway, id: str) -> dict[str, Any]:
    """A request's line of the access log."""
    found: list[dict[str, Any]] = []

    def complete() -> bool:
        found[:] = [each for each in logged(front, 1) if each["request_id"] == id]
        return bool(found)

    eventually(complete)
    return found[0]


def test_each_api_is_relayed_as_it_is_and_counted(servers: Servers, front: Gateway, bills: Path) -> None:
    for number, (path, (body, raw)) in enumerate(ROUTES.items()):
        servers.behaviour = lambda call, raw=raw: call.reply(200, raw)
        servers.clear()
        sent = json.dumps(body, indent=1).encode()
        headers = {
            "x-request-id": f"api-{number}",
            "accept-encoding": "gzip",
            "content-type": "application/json",
        }
        reply = front.client.post(path, content=sent, headers=headers)
        assert (reply.status_code, reply.content) == (200, raw), path
        [call] = servers.calls
        assert (call.body, call.path, call.headers["accept-encoding"]) == (sent, path, "identity")
        entry = entry_of(front, f"api-{number}")
        told = [entry[name] for name in ("outcome", "model", "input_tokens", "output_tokens", "cost")]
        assert told == ["ok", "m", 5, 0, 5e-7], path
        assert not {"ttft", "token_events", "unread"} & entry.keys()

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in bills.read_text().splitlines()]

    eventually(lambda: sum(each["request_id"].startswith("api-") for each in lines()) == len(ROUTES))
    for line in lines():
        counted = line["input_tokens"], line["output_tokens"], line["tokens_from"], line["cost"]
        assert counted == (5, 0, "usage", 5e-7)
    told = re.findall(
        r'^penstock_gateway_(\w+)\{(.*api="(\w+)".*)\} (\S+)$', front.client.get("/metrics").text, re.M
    )
    counts = {"rerank": 3} | dict.fromkeys(
        ("embeddings", "score", "classify", "pooling", "cohere", "ollama", "gemini"), 1
    )
    for api, count in counts.items():
        own = [(name, labels, float(value)) for name, labels, of, value in told if of == api]
        assert [value for name, _, value in own if name == "request_total"] == [count]
        [tokens] = [
            value for name, labels, value in own if name == "tokens_total" and 'kind="input"' in labels
        ]
        assert tokens == 5 * count
        assert [value for name, _, value in own if name == "request_duration_seconds_count"] == [count]
        assert not [name for name, _, _ in own if re.match("time_to_first|inter_token|time_per_output", name)]


def test_what_a_key_may_not_is_refused_in_the_apis_own_shape(servers: Servers, front: Gateway) -> None:
    headers = {"authorization": "Bearer sk-metered"}

    def refused(path: str, body: dict[str, Any], status: int) -> Any:
        reply = front.client.post(path, json=body, headers=headers)
        assert reply.status_code == status, reply.text
        return reply.json()

    other, long = {**TEXT, "model": "x"}, {**TEXT, "input": "long " * 4000}
    assert refused("/v1/embeddings", other, 403)["error"]["code"] == "model_not_allowed"
    assert "not for the model 'x'" in refused("/api/embed", other, 403)["error"]
    assert refused("/v1beta/models/x:embedContent", {}, 403)["error"]["status"] == "PERMISSION_DENIED"
    assert "names no model" in refused("/v2/embed", {"texts": ["a"]}, 403)["message"]
    told = refused("/embed", {"inputs": "a"}, 403)
    assert (told["error_type"], "names no model" in told["error"]) == ("Validation", True)
    assert not servers.calls
    reply = front.client.post("/v1/embeddings", json=TEXT, headers=headers)
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) == 1000 - len(reply.request.content) // 4
    reply = front.client.post("/v1/embeddings", json=TEXT, headers=headers)
    left = 1000 - 5 - len(reply.request.content) // 4
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) == left, "what the server counted holds"
    assert "tokens-per-day" in refused("/v2/embed", long, 429)["message"]
    assert len(servers.calls) == 2
    assert entry_of(front, reply.headers["x-request-id"])["priority"] == -2


def test_a_server_that_dies_before_its_reply_is_left_for_one_other(servers: Servers, front: Gateway) -> None:
    def resets(count: int) -> None:
        left = iter(range(count))
        servers.behaviour = lambda call: call.reply(200, REPLY) if next(left, None) is None else call.reset()

    for body in (TEXT, SEARCH):
        resets(1)
        path = "/v1/embeddings" if body is TEXT else "/rerank"
        reply = front.client.post(path, json=body, headers={"x-request-id": path})
        assert (reply.status_code, reply.content) == (200, REPLY)
        entry = entry_of(front, path)
        assert (entry["attempts"], entry["outcome"]) == (2, "ok")
        assert [each["outcome"] for each in entry["failures"]] == ["network_error"]
    servers.clear()
    resets(9)
    reply = front.client.post("/v1/embeddings", json=TEXT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_failed")
    assert len(servers.calls) == 2, "an input that breaks servers breaks two"
    resets(1)
    assert front.complete().status_code == 502, "a completion is not made twice"


def test_binary_replies_and_sessions(servers: Servers, front: Gateway) -> None:
    raw = bytes(range(256)) * 4096

    def binary(call: Call) -> None:
        assert call.headers["accept"] == "application/octet-stream"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\nx-embedding-shape: 256,1024\r\n"
        call.send(head + b"x-compute-tokens: 7\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)

    servers.behaviour = binary
    headers = {"accept": "application/octet-stream", "x-session-id": "s"}
    for number in range(4):
        headers["x-request-id"] = f"binary-{number}"
        reply = front.client.post("/v1/embeddings", json=TEXT, headers=headers)
        assert reply.content == raw
        assert reply.headers["content-length"] == str(len(raw))
        assert reply.headers["x-embedding-shape"] == "256,1024"
        entry = entry_of(front, f"binary-{number}")
        assert (entry["input_tokens"], entry["output_tokens"], entry["outcome"]) == (7, 0, "ok")
    assert sorted(map(len, (servers.first.calls, servers.second.calls))) == [0, 4], "a session stays"


def test_a_large_reply_to_a_slow_reader_takes_little_memory(servers: Servers, front: Gateway) -> None:
    """40 MB of floats: the server waits while the client does not read; the counts are found at the end."""
    block = b"-0.0123456789," * 4681  # 64 KiB
    begin, end = b'{"data":[{"embedding":[', b"0]}]," + USAGE
    size = len(begin) + 640 * len(block) + len(end)
    waits, read, sent = threading.Event(), threading.Event(), [0]

    def large(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % size)
        call.connection.settimeout(0.5)
        for part in (begin, *[block] * 640, end):
            view = memoryview(part)
            while view:
                try:
                    count = call.connection.send(view)
                except TimeoutError:
                    waits.set()
                    assert read.wait(WAIT_S)
                    call.connection.settimeout(WAIT_S)
                    continue
                view, sent[0] = view[count:], sent[0] + count

    servers.behaviour = large
    url = httpx.URL(front.url)
    body = json.dumps(TEXT).encode()
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-free\r\nx-request-id: large\r\n"
    )
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    before = max(peak(front), resident(front))
    with socket.create_connection((url.host, url.port or 80), WAIT_S) as client:
        client.sendall(head.encode() + body)
        assert waits.wait(WAIT_S)
        assert sent[0] < 32 * MIB, "what the kernel holds"
        read.set()
        got = b""
        while b"\r\n\r\n" not in got:
            got += client.recv(MIB)
        whole, got = hashlib.sha256(), got.partition(b"\r\n\r\n")[2]
        count = 0
        while True:
            whole.update(got)
            count += len(got)
            if count == size:
                break
            got = client.recv(MIB)
            assert got
    wanted = hashlib.sha256(begin)
    for _ in range(640):
        wanted.update(block)
    wanted.update(end)
    assert whole.digest() == wanted.digest()
    assert peak(front) - before < 8 * MIB
    entry = entry_of(front, "large")
    assert (entry["outcome"], entry["input_tokens"], entry["bytes_out"]) == ("ok", 5, size)


def test_a_killed_server() -> None:
    """The reply that it has begun is cut, and is its failure; what it has not begun to answer is answered by
    another server."""
    go = threading.Event()

    def other_one(call: Call) -> None:
        if call.json["input"] == "nothing":
            assert go.wait(WAIT_S)
        call.reply(200, REPLY)

    def fields(input: str) -> dict[str, Any]:
        return {"json": {"model": "m", "input": input}, "headers": {"x-request-id": input}, "timeout": WAIT_S}

    with Upstream(other_one) as other, model_server() as dying, ThreadPoolExecutor(8) as pool:
        dying.behave("half_vectors")
        with gateway(other, dying.url) as front:
            url = f"{front.url}/v1/embeddings"
            waiting = [pool.submit(httpx.post, url, **fields("nothing")) for _ in range(8)]
            eventually(lambda: len(other.calls) + dying.count() == 8)
            begun = dying.count()
            assert 0 < begun < 8, "the one with the least load"
            number = 0
            while True:  # until the one that dies gets it
                number += 1
                with httpx.stream("POST", url, **fields(f"half-{number}")) as reply:
                    parts = reply.iter_raw()
                    if next(parts) == REPLY:
                        continue
                    psutil.Process(dying.process.pid).kill()
                    go.set()
                    with pytest.raises(httpx.RemoteProtocolError):
                        list(parts)
                break
            for each in waiting:
                assert (each.result().status_code, each.result().content) == (200, REPLY)
            entry = entry_of(front, f"half-{number}")
            assert (entry["outcome"], entry["attempts"]) == ("network_error", 1)
            assert "input_tokens" not in entry
            retried = [each for each in logged(front, 8 + number) if each["attempts"] > 1]
            assert len(retried) == begun
