"""A server with a key and short limits, and a gateway in front of one like it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.processes import Gateway
from tests.gateway.processes import gateway as running_gateway
from tests.hostile.http.raw import KEY
from tests.integration.server import SYNTHETIC, Server

OPTIONS = ("--api-key", KEY, "--header-timeout", "2", "--max-request-bytes", "1048576")


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(*SYNTHETIC, *OPTIONS, directory=tmp_path_factory.mktemp("hostile-http")) as running:
        yield running


@pytest.fixture(scope="package")
def gateway(server: Server) -> Iterator[Gateway]:
    with running_gateway(server.url, options=OPTIONS) as running:
        yield running
