"""The report of ``penstock bench host``: as JSON, and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.bench.load.latency import Latency
from penstock.bench.load.messages import RoundResult
from penstock.bench.machine import Machine
from penstock.bench.process_usage import CpuTime
from penstock.bench.server_under_load import MeasuredRound
from penstock.bench.tables import format_table, options_line

BUSY_CLIENT = 0.9
"""CPU share of the load client above which its own queue affects latencies."""
UNSTEADY_FLOOR = 1.5
"""Ratio of the largest to the smallest C floor above which the machine was busy with other work."""


class SlowReading(msgspec.Struct, frozen=True):
    """Effect of slow readers on other clients and on the memory of the API servers.

    ``itl_p99_ms`` and ``itl_p99_without_ms``: medians over the rounds with slow readers, and over those
    before and after; None where no request had two events. ``cut``: connections that the server closed.
    ``resident_growth_bytes``: growth of all API servers from before the slow readers to the last round.
    """

    readers: int
    cut: int
    itl_p99_without_ms: float | None
    itl_p99_ms: float | None
    itl_p99_ratio: float | None
    resident_growth_bytes: int


class StreamMemory(msgspec.Struct, frozen=True):
    """Resident memory of all API servers: before the load, its peak, and after all connections are closed.

    ``bytes_per_stream``: growth up to the peak per stream in flight, including connections and code that runs
    for the first time. It is meaningless for few streams.
    """

    idle_bytes: int
    peak_bytes: int
    after_bytes: int
    bytes_per_stream: float


class Subject(msgspec.Struct, frozen=True):
    """The measured server. Resident memory is that of all API servers, after the last round.

    ``protocol``: that of the load client's connections, with their number.
    """

    protocol: str
    model: str
    prompt_tokens: int
    tokens_per_request: int
    api_servers: int
    engines: int
    api_server_resident_bytes: int
    options: dict[str, Any]


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results. "per CPU-second" means per second of CPU time of all API servers together.

    ``tokens_per_cpu_s`` and ``requests_per_cpu_s`` count successful requests. ``floor_sends_per_cpu_s`` is
    the median of ``floor_measurements``, ``floor_ratio`` the CPU time of the API servers per token divided by
    that of the C floor per send, over HTTP/2 as well; both are None without a C compiler.
    ``events_per_read``: events that the load client got in one read. ``errors`` counts failed requests.
    """

    tokens_per_cpu_s: float
    requests_per_cpu_s: float
    events_per_request: float
    events_per_token: float
    events_per_read: float
    bytes_per_event: float
    floor_sends_per_cpu_s: float | None
    floor_ratio: float | None
    ttft_ms: Latency
    itl_ms: Latency
    errors: int
    error_samples: list[str]
    requests: int
    wall_s: float
    api_server_cpu_s: CpuTime
    engine_cpu_s: CpuTime
    client_cpu_s: float
    client_us_per_event: float
    floor_measurements: list[float]
    rounds: list[MeasuredRound]
    slow_readers: SlowReading | None
    memory: StreamMemory
    subject: Subject
    machine: Machine


def slow_reading(
    readers: int,
    cut: int,
    without: Sequence[RoundResult],
    others: Sequence[RoundResult],
    resident_growth_bytes: int,
) -> SlowReading:
    """Compare rounds without slow readers to rounds of the ``others`` with slow readers."""
    before, beside = _median_p99(without), _median_p99(others)
    ratio = beside / before if before and beside is not None else None
    return SlowReading(
        readers=readers,
        cut=cut,
        itl_p99_without_ms=before,
        itl_p99_ms=beside,
        itl_p99_ratio=ratio,
        resident_growth_bytes=resident_growth_bytes,
    )


def _median_p99(rounds: Sequence[RoundResult]) -> float | None:
    values = [load.itl_ms.p99 for load in rounds if load.itl_ms.p99 is not None]
    return statistics.median(values) if values else None


def build(
    rounds: Sequence[MeasuredRound],
    floor: Sequence[float],
    subject: Subject,
    machine: Machine,
    memory: StreamMemory,
    slow_readers: SlowReading | None = None,
) -> HostReport:
    """The report over ``rounds`` (at least one) and measurements of the floor (none without a compiler)."""
    loads = [each.load for each in rounds]
    requests, errors = sum(load.requests for load in loads), sum(load.errors for load in loads)
    events = sum(load.events for load in loads)
    client_cpu = sum(load.cpu_s for load in loads)
    cpu = sum((each.api_server_cpu_s for each in rounds), CpuTime())
    tokens_per_cpu_s = _ratio((requests - errors) * subject.tokens_per_request, cpu.total)
    sends_per_cpu_s = statistics.median(floor) if floor else None
    return HostReport(
        tokens_per_cpu_s=tokens_per_cpu_s,
        requests_per_cpu_s=_ratio(requests - errors, cpu.total),
        events_per_request=_ratio(events, requests),
        events_per_token=_ratio(events, requests * subject.tokens_per_request),
        events_per_read=_ratio(events, sum(load.reads for load in loads)),
        bytes_per_event=_ratio(sum(load.bytes for load in loads), events),
        floor_sends_per_cpu_s=sends_per_cpu_s,
        floor_ratio=sends_per_cpu_s / tokens_per_cpu_s if sends_per_cpu_s and tokens_per_cpu_s else None,
        ttft_ms=loads[-1].all_ttft_ms,
        itl_ms=loads[-1].all_itl_ms,
        errors=errors,
        error_samples=list(dict.fromkeys(sample for load in loads for sample in load.error_samples)),
        requests=requests,
        wall_s=sum(load.wall_s for load in loads),
        api_server_cpu_s=cpu,
        engine_cpu_s=sum((each.engine_cpu_s for each in rounds), CpuTime()),
        client_cpu_s=client_cpu,
        client_us_per_event=_ratio(client_cpu * 1e6, events),
        floor_measurements=list(floor),
        rounds=list(rounds),
        slow_readers=slow_readers,
        memory=memory,
        subject=subject,
        machine=machine,
    )


def render(report: HostReport) -> str:
    """The report as text for a terminal, without a newline at its end."""
    subject = report.subject
    rates = [each.tokens_per_cpu_s for each in report.rounds]
    span = f"{min(rates):,.0f} to {max(rates):,.0f} in {len(rates)} rounds" if len(rates) > 1 else "1 round"
    cpu, memory = report.api_server_cpu_s, subject.api_server_resident_bytes / 2**20
    floor = (
        [f"{report.floor_sends_per_cpu_s:,.0f}", _floor_spread(report)]
        if report.floor_measurements
        else ["-", ""]
    )
    rows = [
        ("tokens per API-server CPU-second", f"{report.tokens_per_cpu_s:,.0f}", span),
        ("requests per API-server CPU-second", f"{report.requests_per_cpu_s:,.0f}", ""),
        ("C floor, HTTP/1.1 sends per CPU-second", *floor),
        (
            "CPU per token / CPU per floor send",
            f"{report.floor_ratio:.2f}" if report.floor_ratio else "-",
            "",
        ),
        (
            "events per request",
            f"{report.events_per_request:,.2f}",
            f"{report.events_per_token:.3f} per token, {report.events_per_read:,.1f} per read of the client",
        ),
        ("bytes per event", f"{report.bytes_per_event:,.0f}", "with HTTP framing"),
        ("errors", f"{report.errors:,}", f"of {report.requests:,} requests"),
        ("API-server CPU seconds", f"{cpu.total:.2f}", f"about {_share(cpu)} in the kernel"),
        ("engine CPU seconds", f"{report.engine_cpu_s.total:.2f}", ""),
        (
            "client CPU seconds",
            f"{report.client_cpu_s:.2f}",
            f"{report.client_us_per_event:.2f} microseconds per event",
        ),
        ("wall seconds", f"{report.wall_s:.2f}", ""),
        ("API-server resident memory, MiB", f"{memory:,.0f}", f"{subject.api_servers} processes"),
        *_memory_rows(report.memory),
    ]
    lines = [
        str(report.machine),
        options_line(subject.options),
        f"{subject.protocol}; model {subject.model}, prompts of about {subject.prompt_tokens:,} tokens",
        "",
        *format_table(rows),
        "",
        *format_table(
            [
                ("milliseconds", "p50", "p90", "p99", "mean", "max"),
                _latency_row("time to first event", report.ttft_ms),
                _latency_row("between events", report.itl_ms),
            ]
        ),
    ]
    if report.slow_readers is not None:
        lines += ["", *format_table(_slow_rows(report.slow_readers))]
    remarks = notes(report)
    return "\n".join(lines + ([""] + [f"note: {remark}" for remark in remarks] if remarks else []))


def notes(report: HostReport) -> list[str]:
    """Warnings and errors that affect the interpretation of the results."""
    remarks = [f"error: {sample}" for sample in report.error_samples]
    interval = report.subject.options.get("stream_interval")
    if isinstance(interval, int) and report.events_per_token * interval < 0.98:
        remarks.append("tokens were merged into fewer events than asked for: the server was behind")
    busy = _ratio(report.client_cpu_s, report.wall_s)
    if busy > BUSY_CLIENT:
        remarks.append(f"the client used {busy:.0%} of a core, latencies include its own queue")
    if not report.floor_measurements:
        remarks.append("no C floor: there is no C compiler (cc) on this machine")
    elif max(report.floor_measurements) > UNSTEADY_FLOOR * min(report.floor_measurements):
        remarks.append("the C floor varied, so the machine was not quiet")
    return remarks


def _memory_rows(memory: StreamMemory) -> list[tuple[str, ...]]:
    peak, idle, after = (
        f"{value / 2**20:,.0f}" for value in (memory.peak_bytes, memory.idle_bytes, memory.after_bytes)
    )
    return [
        ("  at its peak, MiB", peak, f"{idle} before the load, {after} after it"),
        ("  growth per stream, kB", f"{memory.bytes_per_stream / 1000:,.1f}", "at its peak"),
    ]


def _slow_rows(slow: SlowReading) -> list[tuple[str, ...]]:
    ratio = "-" if slow.itl_p99_ratio is None else f"{slow.itl_p99_ratio:.2f}"
    figures = [
        "-" if value is None else f"{value:,.1f}" for value in (slow.itl_p99_ms, slow.itl_p99_without_ms)
    ]
    grown = slow.resident_growth_bytes / slow.readers / 1024
    return [
        ("slow readers", f"{slow.readers:,}", f"{slow.cut:,} cut by the server"),
        ("others' p99 between events, ratio", ratio, f"{figures[0]} ms beside {figures[1]} ms without them"),
        ("API-server memory per slow reader, KiB", f"{grown:,.0f}", "growth of resident memory"),
    ]


def _latency_row(name: str, latency: Latency) -> tuple[str, ...]:
    values = (latency.p50, latency.p90, latency.p99, latency.mean, latency.max)
    return (name, *("-" if value is None else f"{value:,.1f}" for value in values))


def _floor_spread(report: HostReport) -> str:
    low, high = min(report.floor_measurements), max(report.floor_measurements)
    return f"{low:,.0f} to {high:,.0f} in {len(report.floor_measurements)} runs before and after"


def _share(cpu: CpuTime) -> str:
    return f"{_ratio(cpu.system, cpu.user + cpu.system):.0%}"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
