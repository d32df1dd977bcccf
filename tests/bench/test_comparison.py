"""What is made of the rounds of two measurements."""

from __future__ import annotations

import msgspec
import pytest

from penstock.bench import comparison
from penstock.bench.comparison import ComparisonReport
from penstock.bench.host_benchmark import options_shown
from penstock.bench.load.latency import Latency
from penstock.bench.server_under_load import MeasuredRound
from penstock.config.bench import BenchHostConfig
from tests.bench.test_report import NONE, measured


def compared(first: list[MeasuredRound], second: list[MeasuredRound]) -> ComparisonReport:
    config = BenchHostConfig(streams=4, http2=True)
    other = BenchHostConfig(streams=4)
    sides = comparison.side(config, {"http2": True}, first), comparison.side(other, {"http2": False}, second)
    return comparison.build("--no-http2", *sides)


def test_ratios_are_taken_within_a_round() -> None:
    """The machine is at half its speed in the last round."""
    found = compared(
        [measured(1.0), measured(1.0), measured(2.0)], [measured(4.0), measured(5.0), measured(8.0)]
    )
    assert found.tokens_per_cpu_s.first == pytest.approx(1000.0)
    assert found.tokens_per_cpu_s.second == pytest.approx(200.0)
    figure = found.tokens_per_cpu_s
    assert (figure.ratio, figure.least, figure.most) == pytest.approx((4.0, 4.0, 5.0))
    assert found.us_per_token.ratio == pytest.approx(0.25)
    assert found.us_per_event.first == pytest.approx(1000.0)
    assert found.events_per_token.first == 1.0
    assert found.events_per_read.first == 2.0
    assert msgspec.json.decode(msgspec.json.encode(found), type=ComparisonReport) == found


def test_latencies_are_compared() -> None:
    slow = Latency(1.0, 2.0, 30.0, 1.5, 40.0)
    fast = Latency(1.0, 2.0, 15.0, 1.5, 20.0)
    found = compared([measured(ttft_ms=fast, itl_ms=NONE)], [measured(ttft_ms=slow, itl_ms=NONE)])
    assert (found.ttft_p99_ms.first, found.ttft_p99_ms.second, found.ttft_p99_ms.ratio) == (15.0, 30.0, 0.5)
    assert found.itl_p99_ms.ratio is None


def test_the_report_says_what_differs() -> None:
    text = comparison.render(compared([measured(1.0)], [measured(2.0)]))
    assert "first:  --http2" in text
    assert "HTTP/2 over 4 connections" in text
    assert "second: the same with --no-http2" in text
    assert " ".join(text.split()).count("tokens per CPU-second 1,000 500 2.000 2.000 2.000") == 1
    assert "note:" not in text


def test_a_server_that_was_behind_and_errors_are_told() -> None:
    text = comparison.render(
        compared([measured(events=800)], [measured(errors=100, error_samples=["HTTP 500: x"], events=0)])
    )
    assert "note: error: HTTP 500: x" in text
    text = comparison.render(compared([measured(events=800)], [measured()]))
    assert "note: events per token differ" in text


def test_steps_of_other_numbers_of_tokens_differ_in_their_events() -> None:
    config = BenchHostConfig(tokens_per_step=3)
    sides = [
        comparison.side(each, options_shown(each), [one])
        for each, one in ((config, measured(events=340)), (BenchHostConfig(), measured()))
    ]
    assert "note:" not in comparison.render(comparison.build("--tokens-per-step 1", *sides))
