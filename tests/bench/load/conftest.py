"""A server of HTTP/2 for tests of the load client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench.load.http2_server import Scripted2, running


@pytest.fixture
def scripted2() -> Iterator[Scripted2]:
    """A running server of scripted replies."""
    with running() as script:
        yield script
