"""Endpoints from files that change and names that resolve."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_discovery import (
    ResolvedEndpoint,
    ResolveSchedule,
    resolve,
)
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.upstream.upstream import Upstream


def resolved(
    monkeypatch: pytest.MonkeyPatch,
    names: dict[str, list[str]],
    *urls: str,
    known: Sequence[ResolvedEndpoint] = (),
) -> list[ResolvedEndpoint]:
    """As if ``names`` had these addresses."""

    async def getaddrinfo(host: str, port: int, **more: Any) -> list[Any]:
        if host not in names:
            raise socket.gaierror("no such name")
        return [
            (socket.AF_INET, kind, 0, "", (address, port))
            for address in names[host]
            for kind in (socket.SOCK_STREAM, socket.SOCK_STREAM)
        ]

    async def run() -> list[ResolvedEndpoint]:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        return await resolve(urls, known)

    return asyncio.run(run())


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"many": ["10.0.0.2", "10.0.0.1"], "one": ["10.0.0.9"], "six": ["fd00::1", "fd00::2"]}
    targets = resolved(monkeypatch, names, "http://many:8000", "http://one", "http://six:1", "http://none:1")
    assert [(target.label, target.destination) for target in targets] == [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.2:8000", "10.0.0.2:8000"),
        ("http://10.0.0.9:80", "10.0.0.9:80"),
        ("http://[fd00::1]:1", "[fd00::1]:1"),
        ("http://[fd00::2]:1", "[fd00::2]:1"),
        ("http://none:1", ""),
    ]
    assert targets[0].url == "http://many:8000", "whose name the Host header and TLS have"


def test_a_name_that_does_not_resolve_keeps_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resolved(monkeypatch, {"many": ["10.0.0.1", "10.0.0.2"]}, "http://many")
    again = resolved(monkeypatch, {"new": ["10.0.0.3"]}, "http://many", "http://new", known=before)
    assert [target.destination for target in again] == ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"]
    gone = resolved(monkeypatch, {}, "http://new", known=before)
    assert [(target.url, target.destination) for target in gone] == [("http://new", "")]


@pytest.mark.parametrize("host", ["a..b", "x" * 64, ".a"])
def test_a_name_that_no_name_server_can_be_asked_for_does_not_resolve(host: str) -> None:
    (found,) = asyncio.run(resolve([f"http://{host}:1"]))
    assert (found.url, found.destination) == (f"http://{host}:1", "")


def test_endpoints_that_stay_keep_what_is_known_about_them() -> None:
    gone: list[Endpoint] = []
    pool = EndpointPool(Upstream(), gone.append)
    pool.update([ResolvedEndpoint("http://a"), ResolvedEndpoint("http://b")])
    first, second = pool.endpoints
    pool.update([ResolvedEndpoint("http://b"), ResolvedEndpoint("http://c")])
    assert [endpoint.url for endpoint in pool.endpoints] == ["http://b", "http://c"]
    assert pool.endpoints[0] is second
    assert gone == [first]


def test_a_server_stays_itself_while_the_addresses_beside_it_change(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[Endpoint] = []
    pool = EndpointPool(Upstream(), gone.append)
    known: list[ResolvedEndpoint] = []
    survivors = []
    for addresses in (["10.0.0.1", "10.0.0.2"], ["10.0.0.1"], ["10.0.0.1", "10.0.0.3"]):
        known = resolved(monkeypatch, {"many": addresses}, "http://many:8000", known=known)
        pool.update(known)
        survivors.append(pool.endpoints[0])
    assert survivors[0] is survivors[1] is survivors[2], "with its affinity, breaker and requests in flight"
    assert [each.url for each in (*pool.endpoints, *gone)] == [
        "http://10.0.0.1:8000",
        "http://10.0.0.3:8000",
        "http://10.0.0.2:8000",
    ]


def test_names_are_looked_up_sooner_while_an_endpoint_is_away() -> None:
    """A server that was started again may have another address."""
    schedule = ResolveSchedule(30.0, now=0.0)
    assert [schedule.is_due(at, away=False) for at in (1.0, 29.0, 30.0)] == [False, False, True]
    assert [schedule.is_due(at, away=True) for at in (0.9, 1.0)] == [False, True]
    looked_up = []
    for at in range(100):
        if schedule.is_due(float(at), away=True):
            schedule.resolved(float(at))
            looked_up.append(at)
    assert looked_up == [1, 3, 7, 15, 31, 61, 91]
    assert not schedule.is_due(91.5, away=False)
    assert schedule.is_due(92.0, away=True), "from the beginning"


def test_servers_of_two_names_at_one_address_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in front of them tells them apart by name."""
    names = {"a.example": ["10.0.0.1"], "b.example": ["10.0.0.1"], "10.0.0.1": ["10.0.0.1"]}
    urls = ("https://a.example", "https://a.example:443/", "https://b.example", "http://10.0.0.1:443")
    pool = EndpointPool(Upstream(), lambda endpoint: None)
    pool.update(resolved(monkeypatch, names, *urls))
    assert [each.url for each in pool.endpoints] == [
        "https://10.0.0.1:443#a.example",
        "https://10.0.0.1:443#b.example",
        "http://10.0.0.1:443",
    ]
    survivor = pool.endpoints[1]
    pool.update(resolved(monkeypatch, names, *urls[2:]))
    assert pool.endpoints[0] is survivor
    assert survivor.url == "https://10.0.0.1:443#b.example", "a label stays"
