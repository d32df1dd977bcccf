"""Pause, aborts and weights on a real fleet: through any API server, in every mode, over deaths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server import SYNTHETIC, Server, client_of_each

SERVERS, ENGINES = 2, 2
WAIT_S = 90
PACED = (*SYNTHETIC, "--synthetic-step-ms", "5", "--engine-hang-timeout", "0")

Clients = list[httpx.Client]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--api-server-count", str(SERVERS), "--data-parallel-size", str(ENGINES))
    with Server(*PACED, *options, directory=tmp_path_factory.mktemp("control")) as running:
        yield running


@pytest.fixture
def clients(fleet: Server) -> Iterator[Clients]:
    """One connection to each API server."""
    with client_of_each(fleet, SERVERS, WAIT_S) as found:
        yield found


# -- bad input


WEIGHTS: dict[str, Any] = {"path": "/", "weight_version": "v"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/pause?mode=later", {}, "mode is 'later', not abort, wait or keep."),
        ("/resume?mode=keep", {}, "/resume takes timeout in its query, not 'mode'."),
        ("/abort_requests", {}, "Give one of request_ids, prefix, and all (true)."),
        ("/abort_requests", {"all": False}, "Give one of request_ids, prefix, and all (true)."),
        ("/abort_requests", {"all": True, "prefix": "a"}, "Give one of request_ids, prefix, and all (true)."),
        ("/abort_requests", {"request_ids": []}, "request_ids: expected a list of length >= 1, got []."),
        ("/abort_requests", {"ids": ["a"]}, "ids"),
        ("/update_weights", {"path": "/"}, "the required field 'weight_version' is missing."),
        ("/update_weights", {"weight_version": "v"}, "Give either path or paths."),
        ("/update_weights", WEIGHTS | {"paths": ["/"]}, "Give either path or paths."),
        ("/update_weights", WEIGHTS | {"path": "step-7"}, "path: 'step-7' is no absolute path."),
        ("/update_weights", WEIGHTS | {"path": "/no/such/file"}, "path: '/no/such/file' does not exist."),
        ("/update_weights", WEIGHTS | {"tensors": ["a"], "whole": True}, "whole: a model that is replaced"),
        ("/update_weights", WEIGHTS | {"streams": "drop"}, "streams: "),
        ("/update_weights", WEIGHTS | {"cache": "flush"}, "cache: "),
        ("/update_weights", WEIGHTS | {"weight_version": "default"}, "'default' is that of the start."),
        ("/update_weights", WEIGHTS | {"weight_version": "é"}, "weight_version: "),
        ("/update_weights", WEIGHTS | {"tensor": ["a"]}, "tensor"),
    ],
)
def test_bad_requests(fleet: Server, path: str, body: dict[str, Any], message: str) -> None:
    reply = fleet.post(path, body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"], reply.text


def test_only_administrators(tmp_path: Path) -> None:
    with Server(*SYNTHETIC, "--api-key", "user", "--admin-api-key", "admin", directory=tmp_path) as server:
        client = {"authorization": "Bearer user"}
        for path in ("/pause", "/resume", "/abort_requests", "/flush_cache", "/update_weights"):
            assert server.post(path, {}, **client).json()["error"]["code"] == "not_admin"
        for path in ("/is_paused", "/weight_version", "/weights_checksum"):
            reply = httpx.get(f"{server.url}{path}", headers=client)
            assert reply.json()["error"]["code"] == "not_admin"


def test_versions_before_any_update(fleet: Server, clients: Clients) -> None:
    for client in clients:
        assert client.get("/weight_version").json() == {
            "weight_version": "default",
            "settled": True,
            "engines": [
                {"rank": rank, "weight_version": "default", "generation": 0} for rank in range(ENGINES)
            ],
        }
    assert fleet.metric("penstock:engine_weights", version="default") == 0
