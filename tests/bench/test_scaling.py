"""What is made of measured rounds: ratios, and a fleet of 64 API servers."""

from __future__ import annotations

import msgspec
import pytest

from penstock.bench import scaling
from penstock.bench.process_usage import CpuTime
from penstock.bench.scaling import ScalingPoint, ScalingSample, coordinator_messages
from penstock.config.bench import BenchHostConfig
from tests.bench.test_report import measured

CONFIG = BenchHostConfig(streams=100, tokens=10, api_server_count=[1, 2, 4])
"""As many requests as :func:`measured` says, 1,000 tokens in 10 steps of 100 rows, within 2 s."""


def sample(us_per_token: float, engine_s: float = 0.1, coordinator_s: float = 0.0) -> ScalingSample:
    of_one = measured(us_per_token / 1000)
    round_ = msgspec.structs.replace(of_one, engine_cpu_s=CpuTime(engine_s))
    return ScalingSample(round_, coordinator_s)


def point(
    api_servers: int, *samples: ScalingSample, first: tuple[ScalingSample, ...], accept: float | None = 20.0
) -> ScalingPoint:
    return scaling.point(CONFIG, api_servers, samples, first, None if api_servers == 1 else accept)


def test_ratios_are_taken_within_a_round() -> None:
    first = sample(5.0), sample(10.0), sample(20.0)
    made = point(2, sample(5.5), sample(12.0), sample(20.0), first=first)
    assert made.ratio == pytest.approx(1.1)
    assert made.us_per_token == pytest.approx(12.0)


def test_a_step_has_the_rows_of_all_requests_and_the_coordinator_a_share_of_a_core() -> None:
    only = sample(5.0, engine_s=0.05, coordinator_s=0.01)
    made = point(1, only, only, first=(only, only))
    assert made.engine_ms_per_step == pytest.approx(5.0)
    assert made.coordinator_share == pytest.approx(0.005)
    assert made.events_per_token == pytest.approx(1.0)


def test_shared_parts_are_computed_for_64_api_servers() -> None:
    first = sample(10.0, 0.010)
    points = [
        point(1, first, first=(first,)),
        point(2, sample(11.0, 0.012, 2 * 0.0001 * coordinator_messages(2, 1)), first=(first,)),
        point(4, sample(13.0, 0.016, 2 * 0.0001 * coordinator_messages(4, 1)), first=(first,)),
    ]
    far = scaling.limit(CONFIG, points)
    assert far.us_per_token == pytest.approx(73.0)
    assert far.tokens_per_s == pytest.approx(64 * 1e6 / 73)
    assert far.engine_ms_per_step == pytest.approx(1.0 + 63 * 0.2)
    assert far.engine_tokens_per_s == pytest.approx(100 * 1000 / 13.6)
    assert far.coordinator_share == pytest.approx(0.0001 * coordinator_messages(64, 1))
    assert far.connections_per_s == pytest.approx(50_000)


def test_noise_that_falls_is_not_a_trend() -> None:
    first = sample(10.0)
    points = [point(1, first, first=(first,)), point(2, sample(9.0), first=(first,))]
    assert scaling.limit(CONFIG, points).us_per_token == pytest.approx(9.5)


def test_messages_of_the_coordinator_grow_with_the_square_of_api_servers() -> None:
    assert coordinator_messages(2, 1) == 4 + 10 + 2 + 2 + 20
    assert coordinator_messages(64, 8) == 128 + 80 + 64 * 63 + 64 + 640
