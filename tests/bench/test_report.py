"""Figures from rounds, and how they are shown."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.bench import report
from penstock.bench.load.latency import Latency
from penstock.bench.load.messages import RoundResult
from penstock.bench.machine import Machine, this_machine
from penstock.bench.process_usage import CpuTime
from penstock.bench.report import HostReport, StreamMemory, Subject
from penstock.bench.server_under_load import MeasuredRound

KEYS = {
    "tokens_per_cpu_s",
    "requests_per_cpu_s",
    "events_per_request",
    "floor_sends_per_cpu_s",
    "floor_ratio",
    "ttft_ms",
    "itl_ms",
    "errors",
}
MACHINE = Machine("Fast CPU", 2, "Linux 6", "3.11.7", "1.2.3")
LATENCY = Latency(1.0, 2.0, 3.0, 1.5, 4.0)
NONE = Latency(None, None, None, None, None)


MEMORY = StreamMemory(60 * 2**20, 260 * 2**20, 70 * 2**20, 20_971.5)


def measured(cpu: float = 1.0, **changes: Any) -> MeasuredRound:
    values: dict[str, Any] = {
        "requests": 100,
        "errors": 0,
        "error_samples": [],
        "events": 1000,
        "bytes": 200_000,
        "reads": 500,
        "wall_s": 2.0,
        "cpu_s": 0.5,
        "ttft_ms": NONE,
        "itl_ms": NONE,
        "all_ttft_ms": LATENCY,
        "all_itl_ms": NONE,
    }
    load = RoundResult(**values | changes)
    tokens = (load.requests - load.errors) * 10
    return MeasuredRound(
        load, CpuTime(cpu, cpu / 4, cpu * 3 / 4), CpuTime(0.1, 0.1, 0.0), tokens, tokens / cpu
    )


def built(
    *rounds: MeasuredRound, floor: tuple[float, ...] = (2900.0, 3000.0, 3100.0), interval: Any = 1
) -> HostReport:
    options = {"streams": 4, "stream_interval": interval}
    return report.build(
        rounds, floor, Subject("HTTP/1.1", "m", 32, 10, 1, 1, 2**27, options), MACHINE, MEMORY
    )


def test_memory_is_shown_with_its_peak() -> None:
    text = " ".join(report.render(built(measured())).split())
    assert "at its peak, MiB 260 60 before the load, 70 after it" in text
    assert "growth per stream, kB 21.0 at its peak" in text


def test_figures_are_over_all_rounds() -> None:
    result = built(measured(1.0), measured(3.0))
    assert result.tokens_per_cpu_s == pytest.approx(500.0)
    assert result.requests_per_cpu_s == pytest.approx(50.0)
    assert (result.events_per_request, result.events_per_token) == (10.0, 1.0)
    assert result.bytes_per_event == 200.0
    assert result.floor_sends_per_cpu_s == 3000.0
    assert result.floor_ratio == pytest.approx(6.0)  # 2 ms a token, 1/3 ms a send
    assert result.client_us_per_event == pytest.approx(500.0)
    assert result.api_server_cpu_s == CpuTime(4.0, 1.0, 3.0)


def test_json_has_the_keys() -> None:
    data = json.loads(msgspec.json.encode(built(measured())))
    assert data.keys() >= KEYS
    assert data["ttft_ms"] == {"p50": 1.0, "p90": 2.0, "p99": 3.0, "mean": 1.5, "max": 4.0}
    assert data["itl_ms"] == dict.fromkeys(("p50", "p90", "p99", "mean", "max"))
    assert data["errors"] == 0
    assert data["rounds"][0]["load"]["events"] == 1000
    assert msgspec.json.decode(msgspec.json.encode(built(measured())), type=HostReport) == built(measured())


def test_without_a_compiler_there_is_no_floor() -> None:
    result = built(measured(), floor=())
    data = json.loads(msgspec.json.encode(result))
    assert data["floor_sends_per_cpu_s"] is None
    assert data["floor_ratio"] is None
    assert "note: no C floor" in report.render(result)


def test_requests_that_went_wrong_do_not_count_as_tokens() -> None:
    result = built(measured(errors=50, error_samples=["HTTP 500: x"]), measured(errors=0))
    assert result.errors == 50
    assert result.tokens_per_cpu_s == pytest.approx(750.0)
    text = report.render(result)
    assert "note: error: HTTP 500: x" in text


def test_a_run_without_any_success_has_a_report() -> None:
    result = built(measured(errors=100, events=0, bytes=0))
    assert (result.tokens_per_cpu_s, result.bytes_per_event, result.floor_ratio) == (0.0, 0.0, None)
    assert "tokens per API-server CPU-second" in report.render(result)


@pytest.mark.parametrize(
    ("result", "note"),
    [
        (built(measured(events=900)), "tokens were merged"),
        (built(measured(events=100), interval=10), None),
        (built(measured(events=90), interval=10), "tokens were merged"),
        (built(measured(events=500), interval="auto"), None),
        (built(measured(cpu_s=1.9)), "the client used 95% of a core"),
        (built(measured(), floor=(2000.0, 3100.0)), "the C floor varied"),
        (built(measured()), None),
    ],
)
def test_notes_say_what_spoils_figures(result: HostReport, note: str | None) -> None:
    notes = report.notes(result)
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)


def test_the_table_is_aligned() -> None:
    lines = report.render(built(measured(1.0), measured(2.0))).splitlines()
    assert lines[0] == "penstock 1.2.3, Python 3.11.7, Linux 6, Fast CPU, 2 cores"
    assert lines[1] == "--streams 4 --stream-interval 1"
    rows = lines[4 : lines.index("", 4)]
    ends = {
        len(row[: row.index(value) + len(value)])
        for row, value in zip(rows, ("667", "67", "3,000"), strict=False)
    }
    assert len(ends) == 1
    assert rows[0].endswith("500 to 1,000 in 2 rounds")


def test_this_machine_is_known() -> None:
    here = this_machine()
    assert here.cores >= 1
    assert here.cpu


def test_slow_readers_are_told_by_their_effect_on_the_others() -> None:
    def with_p99(*values: float) -> list[RoundResult]:
        return [measured(itl_ms=Latency(1.0, 1.0, value, 1.0, value)).load for value in values]

    slow = report.slow_reading(200, 3, with_p99(10.0, 30.0, 20.0), with_p99(25.0, 24.0, 90.0), 200 * 2048)
    assert (slow.itl_p99_without_ms, slow.itl_p99_ms, slow.itl_p99_ratio) == (20.0, 25.0, 1.25)
    text = report.render(msgspec.structs.replace(built(measured()), slow_readers=slow))
    assert "1.25" in text
    assert "3 cut by the server" in text


def test_slow_readers_beside_requests_of_one_event_have_no_ratio() -> None:
    slow = report.slow_reading(1, 0, [measured().load], [measured().load], 0)
    assert slow.itl_p99_ratio is None
    assert "ratio" in report.render(msgspec.structs.replace(built(measured()), slow_readers=slow))
