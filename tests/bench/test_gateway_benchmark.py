"""The gateway is measured as a process, in front of real servers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest

from penstock.bench import gateway_benchmark
from penstock.bench.gateway_benchmark import (
    GatewayReport,
    compare_gateways,
    measure_gateway,
    pick_cost_us,
    render,
)
from penstock.config.bench import BenchGatewayConfig


@pytest.mark.usefixtures("few_sends")
def test_a_small_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_benchmark, "pick_cost_us", partial(pick_cost_us, picks=10, runs=1))
    config = BenchGatewayConfig(streams=4, http2=True, tokens=8, rounds=1, step_ms=1.0, timeout=120.0)
    said: list[str] = []
    report = measure_gateway(config, said.append)
    assert report.errors == 0
    assert report.relay.requests == 4
    assert report.cpu_us_per_event > 0
    assert list(report.cpu_us_per_pick) == [64, 1000]
    assert min(report.cpu_us_per_pick.values()) > 0
    assert report.resident_bytes > 1 << 20
    assert report.relay.subject.protocol == "HTTP/2 over 4 connections"
    assert "starting model server 1 of 1" in said
    assert msgspec.json.decode(msgspec.json.encode(report), type=GatewayReport) == report
    assert "CPU per relayed event" in render(report)


def test_two_gateways_are_compared_before_the_same_servers() -> None:
    config = BenchGatewayConfig(
        streams=4, tokens=8, rounds=1, step_ms=1.0, timeout=120.0, compare_with="--http2"
    )
    said: list[str] = []
    report = compare_gateways(config, replace(config, http2=True), said.append)
    assert report.errors == 0
    assert report.us_per_event.ratio is not None
    assert report.first.protocol == "HTTP/1.1 over 4 connections"
    assert report.second.protocol == "HTTP/2 over 4 connections"
    assert said.count("starting penstock gateway") == 2
    assert sum(line.startswith("starting model server") for line in said) == 1


def test_picks_are_measured() -> None:
    assert pick_cost_us(9, picks=10, runs=1) > 0
