"""Endpoints from files that change and names that resolve."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_discovery import (
    EndpointsFile,
    ResolvedEndpoint,
    read_endpoints,
    resolve,
)
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.upstream.timeouts import Timeouts
from tests.gateway.behaviours import good
from tests.gateway.processes import Upstream, eventually, gateway

TWO = ["http://a:8000", "https://b.example/"]


@pytest.mark.parametrize(
    "text",
    [
        "http://a:8000\nhttps://b.example/\n",
        "# ours\nhttp://a:8000  # first\n\n  # between\nhttps://b.example/",
        "- http://a:8000\n- 'https://b.example/'  # quoted\n",
        '["http://a:8000", "https://b.example/"]',
        "# fleet\nendpoints:\n  - http://a:8000\n  # rest\n  - https://b.example/\n",
    ],
)
def test_ways_to_write_a_file(text: str) -> None:
    assert read_endpoints(text) == TWO


@pytest.mark.parametrize("text", ["", "# nobody\n", "endpoints: []", "[]"])
def test_a_file_may_name_nobody(text: str) -> None:
    assert read_endpoints(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:8000", "'a:8000' is not http://HOST:PORT"),
        ("- http://a/path", "'http://a/path' is not"),
        ("- http://a:99999", "'http://a:99999' is not"),
        ("servers: [http://a]", "unknown field `servers`"),
        ("endpoints: http://a", "Expected `array`"),
        ("- {url: http://a}", "Expected `str`"),
        ("[http://a", "expected"),
    ],
)
def test_files_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_endpoints(text)


def write(path: Path, text: str, *, at: int) -> None:
    """``at``: seconds of its modification time, so that no two are alike."""
    path.write_text(text)
    os.utime(path, (at, at))


def test_a_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "endpoints.yaml"
    write(path, "- http://a:1\n", at=1)
    file = EndpointsFile(str(path))
    assert file.urls() == file.urls() == ["http://a:1"]
    write(path, "- http://b:1\n", at=2)
    assert file.urls() == ["http://b:1"]
    write(path, "- nonsense\n", at=3)
    with caplog.at_level(logging.ERROR):
        assert file.urls() == ["http://b:1"], "the last good one counts"
        assert file.urls() == ["http://b:1"]
    assert caplog.text.count("the endpoints stay as they are") == 1, "it is said once"
    path.unlink()
    assert file.urls() == ["http://b:1"]
    assert caplog.text.count("the endpoints stay as they are") == 2
    write(path, "- http://c:1\n", at=4)
    assert file.urls() == ["http://c:1"]


def test_a_first_file_must_be_good(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--endpoints-file .*No such file"):
        EndpointsFile(str(tmp_path / "none")).urls()


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
        ("http://one", "10.0.0.9:80"),
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


def test_endpoints_that_stay_keep_what_is_known_about_them() -> None:
    gone: list[Endpoint] = []
    pool = EndpointPool(Timeouts(), gone.append)
    pool.update([ResolvedEndpoint("http://a"), ResolvedEndpoint("http://b")])
    first, second = pool.endpoints
    pool.update([ResolvedEndpoint("http://b"), ResolvedEndpoint("http://c")])
    assert [endpoint.url for endpoint in pool.endpoints] == ["http://b", "http://c"]
    assert pool.endpoints[0] is second
    assert gone == [first]


def test_a_gateway_follows_its_file(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    with Upstream(good) as one, Upstream(good) as other:
        path.write_text(f"endpoints:\n- {one.url}\n")
        with gateway(options=("--endpoints-file", str(path))) as front:
            assert front.complete().status_code == 200
            assert len(one.calls) == 1
            path.write_text(f"endpoints:\n- {other.url}\n# moved\n")
            eventually(lambda: front.counts("endpoint_up") == {other.url: 1})
            assert front.complete().status_code == 200
            assert (len(one.calls), len(other.calls)) == (1, 1)
