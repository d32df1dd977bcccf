"""What the choices of a request share is sent and held once: their number does not multiply a body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.hostile.bystander import Bystander
from tests.hostile.memory_watch import MemoryWatch
from tests.integration.server import Server

CHOICES = 1024
MAX_MIB = 100
"""A body of 1 MB for each choice would take a gigabyte."""
MAX_GAPS = 10
TOKENS = list(range(100, 400)) * 300
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "y" * 1_000_000}}}
FIELDS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "allowed_token_ids": {"allowed_token_ids": TOKENS},
    "stop_token_ids": {"stop_token_ids": TOKENS},
    "logit_bias": {"logit_bias": {str(token): 1 for token in range(4000)}},
    "prompt": {"prompt": TOKENS[:400]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(directory=tmp_path_factory.mktemp("choices")) as running:
        assert len(running.complete("hello", n=CHOICES, max_tokens=2)["choices"]) == CHOICES  # warm
        yield running


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "schema" else []) for name in FIELDS]
)
def test_many_choices_take_the_memory_of_one(server: Server, name: str) -> None:
    processes = server.children("api-server") + server.children("engine")
    with MemoryWatch(processes) as watch, Bystander(server.url, processes) as bystander:
        body = {"prompt": "hello", "n": CHOICES, "max_tokens": 2, **FIELDS[name]}
        reply = server.post("/v1/completions", body, timeout=100)
    assert reply.status_code == 200, reply.text[:500]
    assert len(reply.json()["choices"]) == CHOICES
    assert max(watch.grown_mib.values()) < MAX_MIB, watch.grown_mib
    assert bystander.gaps.broken == []
    assert bystander.gaps.ratio < MAX_GAPS, bystander.gaps
