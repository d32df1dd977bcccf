"""The gateway is measured as a process, in front of real servers."""

from __future__ import annotations

import msgspec

from penstock.bench.gateway_benchmark import GatewayReport, measure_gateway, pick_cost_us, render
from penstock.config.bench import BenchGatewayConfig


def test_a_small_measurement() -> None:
    config = BenchGatewayConfig(streams=4, tokens=8, rounds=1, step_ms=1.0, servers=2, timeout=120.0)
    said: list[str] = []
    report = measure_gateway(config, said.append)
    assert report.errors == 0
    assert report.relay.requests == 4
    assert report.cpu_us_per_event > 0
    assert report.resident_bytes > 1 << 20
    assert "starting model server 2 of 2" in said
    assert msgspec.json.decode(msgspec.json.encode(report), type=GatewayReport) == report
    assert "CPU per relayed event" in render(report)


def test_picks_are_measured() -> None:
    assert pick_cost_us(picks=10, runs=1) > 0
