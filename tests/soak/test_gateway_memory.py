"""The gateway's memory, under requests that end in every way."""

from __future__ import annotations

import msgspec
import pytest

from penstock.gateway.responses.outcome import Outcome
from tests.soak.config import GatewayMemoryConfig
from tests.soak.gateway_memory import MemoryReport, measure_memory, render

MIB = 1 << 20


@pytest.mark.parametrize("requests", [1_500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_memory_stays_flat(requests: int) -> None:
    """Clients make up thousands of models. What remembers by request (prefixes, sessions, metrics) is bounded
    by number, and knows most of these after the first half."""
    said: list[str] = []
    report = measure_memory(GatewayMemoryConfig(requests=requests, timeout=1800), said.append)
    samples = report.samples
    assert [sample.requests for sample in samples] == [requests * tenth // 10 for tenth in range(1, 11)]
    middle, last = samples[4], samples[-1]
    assert last.resident_bytes - middle.resident_bytes < 8 * MIB
    assert (last.objects or 0) - (middle.objects or 0) < 500, "28 for each request when they are kept"
    assert last.descriptors - middle.descriptors < 40
    assert sum(report.outcomes.values()) == requests, "each is counted once"
    assert set(report.outcomes) >= set(Outcome) - {Outcome.OK_WITHOUT_USAGE}
    assert msgspec.json.decode(msgspec.json.encode(report), type=MemoryReport) == report
    assert "tracked objects per 1,000 requests" in render(report)
    assert len(said) == 11
