"""Servers that all modules share."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from tests.gateway.processes import Gateway
from tests.gateway.processes import gateway as running_gateway
from tests.hostile.routes.attack import send_all
from tests.hostile.routes.cases import REQUESTS, sample, singles
from tests.integration.server import Server

DEMO = ("--max-model-len", "512", "--max-num-seqs", "64")
"""The bundled model: unlike the synthetic engine it takes grammars, biases and penalties."""
WARM_UP = 40
"""Cases of each route before memory counts."""
WARM_UP_S = 4.0


def warm_up(url: str) -> None:
    for path in REQUESTS:
        send_all(url, sample(list(singles(path)), WARM_UP, seed=99), WARM_UP_S)


def processes_of(server: Server) -> list[psutil.Process]:
    supervisor = psutil.Process(server.process.pid)
    return [supervisor, *supervisor.children(recursive=True)]


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A warm server of the bundled model."""
    with Server(*DEMO, directory=tmp_path_factory.mktemp("demo")) as server:
        warm_up(server.url)
        yield server


@pytest.fixture(scope="package")
def front(demo: Server) -> Iterator[Gateway]:
    """A warm gateway in front of it."""
    with running_gateway(demo.url) as running:
        warm_up(running.url)
        yield running
