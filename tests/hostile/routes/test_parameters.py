"""Every route and method with hostile paths, queries and headers, as the server's own document lists them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from tests.gateway.processes import Gateway
from tests.hostile.memory_watch import MemoryWatch
from tests.hostile.routes.attack import JSON, Client, Faults, fault
from tests.hostile.routes.conftest import processes_of
from tests.integration.server import Server

METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")
FAST = 6
"""Every n-th request is among those that always run."""
MAX_GROWTH_MIB = 50.0
AWAKE_MIB = 150.0
"""What an engine that has slept takes again: weights and cache."""
_TEXTS = (
    "",
    "0",
    "1",
    "-1",
    "1.5",
    "nan",
    "inf",
    "1e999",
    "9" * 5000,
    "abc",
    "true",
    "\x00",
    "é😀",
    "%",
    "a" * 30_000,
)
_PATHS = (
    "/",
    "//",
    "/.",
    "/..",
    "/../../etc/passwd",
    "/%00",
    "/%ff",
    "/%",
    "/%2e%2e/",
    "/v1",
    "/v1/",
    "/v1//completions",
    "/v1/completions/",
    "/V1/completions",
    "/v1/completions%20",
    "/v1/models/",
    "/v1/models/%00",
    "/v1/models/..",
    "/v1/models/" + "a" * 30_000,
    "/admin/engines/",
    "/admin/engines/x/drain",
    "/admin/engines/-1/drain",
    "/admin/engines/99999999999999999999/resume",
    "/admin/engines/" + "9" * 5000 + "/drain",
    "/debug/gc?x=1",
    "/health?" + "a=1&" * 5000,
    "/metrics?name[]=x",
    "/docs/../health",
    "*",
    "http://other/health",
    "/" + "a/" * 10_000,
)
_BODY = {"prompt": "x", "max_tokens": 1}
_HEADERS: tuple[dict[str, str], ...] = (
    {"Authorization": "Bearer "},
    {"Authorization": "Bearer " + "a" * 20_000},
    {"Authorization": "Basic YTpi"},
    {"Authorization": "é"},
    {"X-Request-Id": "a" * 300},
    {"X-Request-Id": "\xff\x01"},
    {"X-Session-Id": "s" * 60_000},
    {"X-data-parallel-rank": "9" * 5000},
    {"X-data-parallel-rank": "-1"},
    {"X-data-parallel-rank": "1.5"},
    {"X-data-parallel-rank": "0, 0"},
    {"Idempotency-Key": "k" * 300},
    {"Idempotency-Key": ""},
    {"Expect": "200-ok"},
    {"Content-Type": "application/json; charset=latin-1"},
    {"Content-Type": "a" * 1000},
    {"Accept": "x/" * 5000},
    {"Content-Encoding": "gzip"},
    {"Transfer-Encoding": "gzip"},
    {"Connection": "close, keep-alive"},
    {"Range": "bytes=0-1"},
    {"Origin": "null"},
    {"Origin": "http://a" * 1000},
    {"traceparent": "00-" + "0" * 50},
    {"traceparent": "x" * 9000},
    {"Via": "1.1 x"},
    {"Upgrade": "websocket", "Connection": "Upgrade"},
    {"Cookie": "a=b; " * 2000},
)


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed
    fields: frozenset[str] = frozenset()
    body: dict[str, Any] = _BODY

    def __str__(self) -> str:
        return f"{self.method} {self.path[:200]} {str(self.headers)[:200]}"


def _samples(schema: dict[str, Any]) -> Iterator[str]:
    for name in ("minimum", "maximum"):
        if name in schema:
            yield from (str(schema[name] + step) for step in (-1, 0, 1))
    yield from map(str, schema.get("enum", ()))
    yield "a" * (schema.get("maxLength", 64) + 1)
    yield from _TEXTS


def documented(document: dict[str, Any]) -> Iterator[Request]:
    """Every route with every method, and with each of its parameters."""
    for path, operations in document["paths"].items():
        plain = path.replace("{rank}", "0").replace("{model}", "x")
        bodies = [each["requestBody"] for each in operations.values() if "requestBody" in each]
        sent = _BODY if all(each["required"] for each in bodies) else {}
        yield from (Request(method, plain, body=sent) for method in METHODS)
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                name, place = parameter["name"], parameter["in"]
                for value in _samples(parameter["schema"]):
                    if place == "path":
                        yield Request(method.upper(), path.replace(f"{{{name}}}", quote(value)))
                    elif place == "query":
                        named: frozenset[str] = frozenset(() if "profile" in path else (name,))
                        if sent and "requestBody" in operation:  # of other fields than the one that is sent
                            named |= _BODY.keys()
                        yield Request(method.upper(), f"{plain}?{name}={quote(value)}", {}, named, sent)
                        yield Request(method.upper(), f"{plain}?{name}=1&{name}={quote(value)}", body=sent)
                    elif value.isprintable():
                        named_value = {name: value.encode().decode("latin-1")}
                        yield Request(method.upper(), plain, named_value, body=sent)


def odd() -> Iterator[Request]:
    """Paths that are no routes, and headers that are none."""
    yield from (Request(method, path) for path, method in itertools.product(_PATHS, ("GET", "POST")))
    for headers, path in itertools.product(
        _HEADERS, ("/v1/completions", "/version", "/tokenize", "/nothing")
    ):
        yield Request("GET" if path == "/version" else "POST", path, headers)


def try_all(url: str, requests: Sequence[Request]) -> Faults:
    """One after the other: some make engines drain or sleep, which is undone after each."""
    faults, client = Faults(), Client(url)
    for request in requests:
        sends_body = request.method not in ("GET", "HEAD", "TRACE", "OPTIONS")
        try:
            reply = client.send(
                request.method,
                request.path,
                json.dumps(request.body).encode() if sends_body else None,
                JSON | request.headers,
            )
        except (HTTPException, OSError, UnicodeError) as error:
            faults.add(f"no reply: {error!r}: {request}")
            client.close()
            continue
        faults.count(reply.status)
        if request.method != "HEAD" and not _failed_operation(reply.status, request.path):
            problem = fault(reply, request.fields)
            if problem is not None:
                faults.add(f"{problem}: {request}")
        try:
            if "sleep" in request.path:
                client.send("POST", "/wake_up")
            elif "drain" in request.path:
                client.send("POST", "/admin/engines/0/resume")
            after = client.send("GET", "/version")
            if after.status != 200:
                faults.add(f"the next request got {after.status}: {request}")
        except (HTTPException, OSError) as error:
            faults.add(f"the next request failed: {error!r}: {request}")
            client.close()
    client.close()
    return faults


def _failed_operation(status: int, path: str) -> bool:
    """Whether it is a documented failure of an operation of all engines, whose reply has receipts."""
    administrative = ("/sleep", "/wake_up", "/start_profile", "/stop_profile", "/reset_prefix_cache")
    return status in (409, 502, 504) and path.partition("?")[0] in administrative


def attack(server: Server, url: str, every: int) -> None:
    document = server.get("/openapi.json").json()
    requests = [*documented(document), *odd()]
    with MemoryWatch(processes_of(server)) as memory:
        faults = try_all(url, requests[::every])
    assert not faults.found, str(faults)
    assert faults.statuses[200] > 3
    for name, mib in memory.grown_mib.items():
        assert mib < MAX_GROWTH_MIB + AWAKE_MIB * ("engine" in name), memory.grown_mib
    assert server.complete(max_tokens=2)["choices"]


def test_some_hostile_paths_queries_and_headers(demo: Server) -> None:
    attack(demo, demo.url, FAST)


def test_some_hostile_paths_through_the_gateway(demo: Server, front: Gateway) -> None:
    attack(demo, front.url, FAST * 2)


@pytest.mark.slow
def test_hostile_paths_queries_and_headers(demo: Server) -> None:
    attack(demo, demo.url, 1)


@pytest.mark.slow
def test_hostile_paths_through_the_gateway(demo: Server, front: Gateway) -> None:
    attack(demo, front.url, 1)
