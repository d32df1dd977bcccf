"""The load client as a process of its own."""

from __future__ import annotations

import os

import pytest

from penstock.bench.errors import BenchError
from penstock.bench.load.messages import LoadPlan
from penstock.bench.load.process import LoadProcess
from tests.bench.conftest import Scripted, refusal


def plan(port: int) -> LoadPlan:
    return LoadPlan("127.0.0.1", port, "/v1/completions", ["{}"], connections=3, in_flight=3, requests=6)


def test_rounds_are_run_in_another_process(scripted: Scripted) -> None:
    with LoadProcess(plan(scripted.port), 30.0) as process:
        assert process.pid != os.getpid()
        first, second = (process.run(keep=keep, seconds=30.0) for keep in (False, True))
    assert (first.requests, first.errors, first.events) == (6, 0, 18)
    assert (second.requests, second.errors, second.events) == (6, 0, 18)
    assert second.cpu_s > 0
    assert second.ttft_ms.p50 is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_errors_come_over(scripted: Scripted) -> None:
    scripted.reply = lambda number: refusal(b"404 Not Found", b"no such model")
    with LoadProcess(plan(scripted.port), 30.0) as process:
        result = process.run(keep=True, seconds=30.0)
    assert (result.errors, result.error_samples) == (6, ["HTTP 404: no such model"])


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(BenchError, match=r"cannot connect to 127\.0\.0\.1:1: "):
        LoadProcess(plan(1), 30.0)


def test_a_round_that_takes_too_long_fails(scripted: Scripted) -> None:
    scripted.hold.clear()
    with (
        LoadProcess(plan(scripted.port), 30.0) as process,
        pytest.raises(BenchError, match="time is over with 0 of 6 requests"),
    ):
        process.run(keep=True, seconds=0.1)


def test_a_client_that_dies_is_reported(scripted: Scripted) -> None:
    with LoadProcess(plan(scripted.port), 30.0) as process:
        os.kill(process.pid, 9)
        with pytest.raises(BenchError, match="the load client ended with exit code -9"):
            process.run(keep=True, seconds=5.0)
