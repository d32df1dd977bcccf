"""What the tests of HTTP/2 share."""

from __future__ import annotations

import math

import pytest

from penstock.http.http2 import connection


@pytest.fixture(autouse=True)
def unlimited_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read handles all its frames in one turn on any machine; a test of turns sets its own limit."""
    monkeypatch.setattr(connection, "TURN_S", math.inf)
