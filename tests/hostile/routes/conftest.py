"""Servers that all modules share."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import psutil
import pytest

from tests.gateway.processes import Gateway
from tests.gateway.processes import gateway as running_gateway
from tests.hostile.routes.attack import send_all
from tests.hostile.routes.cases import POOLED, REQUESTS, sample, singles
from tests.integration.server import Server

DEMO = ("--max-model-len", "512", "--max-num-seqs", "64")
"""The bundled model: unlike the synthetic engine it takes grammars, biases and penalties."""
VECTORS = ("--engine", "synthetic", "--synthetic-step-ms", "0", "--runner", "both")
VECTORS += ("--max-model-len", "512", "--served-model-name", "penstock-demo")
WARM_UP = 40
"""Cases of each route before memory counts."""
WARM_UP_S = 4.0


def warm_up(url: str, paths: Collection[str]) -> None:
    for path in paths:
        send_all(url, sample(list(singles(path)), WARM_UP, seed=99), WARM_UP_S)


def processes_of(server: Server) -> list[psutil.Process]:
    supervisor = psutil.Process(server.process.pid)
    return [supervisor, *supervisor.children(recursive=True)]


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A warm server of the bundled model."""
    with Server(*DEMO, directory=tmp_path_factory.mktemp("demo")) as server:
        warm_up(server.url, REQUESTS.keys() - POOLED)
        yield server


@pytest.fixture(scope="package")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A warm server of vectors, scores and labels."""
    with Server(*VECTORS, directory=tmp_path_factory.mktemp("vectors")) as server:
        warm_up(server.url, POOLED & REQUESTS.keys())
        yield server


@pytest.fixture(scope="package")
def front(demo: Server) -> Iterator[Gateway]:
    """A warm gateway in front of it."""
    with running_gateway(demo.url) as running:
        warm_up(running.url, REQUESTS.keys() - POOLED)
        yield running
