from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def allocated() -> Callable[[Callable[[], Any]], int]:
    """The most bytes that Python has allocated at once during a call."""

    def measure(call: Callable[[], Any]) -> int:
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return measure
