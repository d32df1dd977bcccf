"""Two measurements by turns (``--compare-with``): ratios within a round cancel changes of the machine."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.host_benchmark import options_shown, protocol_of
from penstock.bench.machine import Machine, this_machine
from penstock.bench.server_process import serve_arguments
from penstock.bench.server_under_load import MeasuredRound, MeasuredServer, ServerUnderLoad, start_server
from penstock.bench.tables import format_table, options_line
from penstock.config.bench import BenchHostConfig

UNEQUAL_EVENTS = 0.02
"""Difference of events per token above which CPU times per token do not compare."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two measurements. Figures are medians over its rounds; None where there is none.

    CPU times are those of the API servers, or of the gateway. ``events_per_read``: events that the load
    client got in one read.
    """

    protocol: str
    options: dict[str, Any]
    tokens_per_cpu_s: float
    us_per_token: float
    us_per_event: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p99_ms: float | None
    events_per_token: float
    events_per_read: float
    errors: int
    error_samples: list[str]
    rounds: list[MeasuredRound]


class Ratio(msgspec.Struct, frozen=True):
    """Ratios of the first measurement to the second in the same round; None without any."""

    median: float | None
    least: float | None
    most: float | None

    @classmethod
    def of(cls, pairs: Sequence[tuple[float | None, float | None]]) -> Ratio:
        """From a figure of both measurements in each round."""
        ratios = [first / second for first, second in pairs if first is not None and second]
        return cls(statistics.median(ratios), min(ratios), max(ratios)) if ratios else cls(None, None, None)


class ComparisonReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results: both measurements, and the ratios of the first to the second.

    ``load_average``: that of the machine in the last minute, with this measurement.
    """

    first: Side
    second: Side
    tokens_per_cpu_s: Ratio
    us_per_token: Ratio
    us_per_event: Ratio
    ttft_p99_ms: Ratio
    itl_p99_ms: Ratio
    errors: int
    load_average: float
    machine: Machine


def measure(config: BenchHostConfig, other: BenchHostConfig, say: ProgressCallback) -> ComparisonReport:
    """Runs both by turns: on one server, if its options are the same. Raises BenchError."""
    deadline = Deadline(config.timeout)
    with contextlib.ExitStack() as stack:
        servers: dict[tuple[str, ...], MeasuredServer] = {}
        sides = []
        for each in (config, other):
            arguments = serve_arguments(each, each.api_server_count[0])
            key = (*arguments, str(each.tls))
            if key not in servers:
                say(f"starting penstock {' '.join(arguments)}{' with TLS' if each.tls else ''}")
                servers[key] = start_server(each, each.api_server_count[0], stack, deadline)
            sides.append(ServerUnderLoad(each, servers[key], stack, deadline))
        return measure_sides(
            (sides[0], sides[1]), (options_shown(config), options_shown(other)), deadline, say
        )


def measure_sides(
    sides: tuple[ServerUnderLoad, ServerUnderLoad],
    options: tuple[dict[str, Any], dict[str, Any]],
    deadline: Deadline,
    say: ProgressCallback,
) -> ComparisonReport:
    """Runs the rounds of two connected load clients by turns. Raises BenchError."""
    first, second = sides
    config = first.config
    for _ in range(config.warmup_rounds):
        for side in sides:
            side.run(deadline.left("the warm-up"), keep=False)
    pairs: list[tuple[MeasuredRound, MeasuredRound]] = []
    for number in range(1, config.rounds + 1):
        stage = f"round {number}"
        # Each is first in every other round.
        if number % 2:
            one = first.run(deadline.left(stage))
            pairs.append((one, second.run(deadline.left(stage))))
        else:
            other = second.run(deadline.left(stage))
            pairs.append((first.run(deadline.left(stage)), other))
        costs = ", ".join(f"{us_per_token(each):.2f}" for each in pairs[-1])
        say(f"{stage} of {config.rounds}: {costs} microseconds per token")
    return build(sides[0].config, sides[1].config, options, pairs)


def build(
    config: BenchHostConfig,
    other: BenchHostConfig,
    options: tuple[dict[str, Any], dict[str, Any]],
    pairs: Sequence[tuple[MeasuredRound, MeasuredRound]],
) -> ComparisonReport:
    """The report over rounds of both."""

    def ratio(figure: Callable[[MeasuredRound], float | None]) -> Ratio:
        return Ratio.of([(figure(one), figure(two)) for one, two in pairs])

    first = _side(config, options[0], [one for one, _ in pairs])
    second = _side(other, options[1], [two for _, two in pairs])
    return ComparisonReport(
        first=first,
        second=second,
        tokens_per_cpu_s=ratio(lambda each: each.tokens_per_cpu_s),
        us_per_token=ratio(us_per_token),
        us_per_event=ratio(us_per_event),
        ttft_p99_ms=ratio(lambda each: each.load.ttft_ms.p99),
        itl_p99_ms=ratio(lambda each: each.load.itl_ms.p99),
        errors=first.errors + second.errors,
        load_average=os.getloadavg()[0],
        machine=this_machine(),
    )


def us_per_token(each: MeasuredRound) -> float:
    """CPU microseconds per token; 0 without any."""
    return 1e6 / each.tokens_per_cpu_s if each.tokens_per_cpu_s else 0.0


def us_per_event(each: MeasuredRound) -> float:
    """CPU microseconds per event; 0 without any."""
    return 1e6 * each.api_server_cpu_s.total / each.load.events if each.load.events else 0.0


def _side(config: BenchHostConfig, options: dict[str, Any], rounds: list[MeasuredRound]) -> Side:
    loads = [each.load for each in rounds]
    requests, events = sum(load.requests for load in loads), sum(load.events for load in loads)
    return Side(
        protocol=protocol_of(config),
        options=options,
        tokens_per_cpu_s=statistics.median(each.tokens_per_cpu_s for each in rounds),
        us_per_token=statistics.median(map(us_per_token, rounds)),
        us_per_event=statistics.median(map(us_per_event, rounds)),
        ttft_p50_ms=_median(load.ttft_ms.p50 for load in loads),
        ttft_p99_ms=_median(load.ttft_ms.p99 for load in loads),
        itl_p99_ms=_median(load.itl_ms.p99 for load in loads),
        events_per_token=events / (requests * config.tokens) if requests else 0.0,
        events_per_read=events / (sum(load.reads for load in loads) or 1),
        errors=sum(load.errors for load in loads),
        error_samples=list(dict.fromkeys(sample for load in loads for sample in load.error_samples)),
        rounds=rounds,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def render(report: ComparisonReport) -> str:
    """The report as text for a terminal, without a newline at its end."""
    first, second = report.first, report.second
    changed = {
        name: value
        for name, value in {**dict.fromkeys(first.options, "default"), **second.options}.items()
        if first.options.get(name, "default") != value
    }
    table: list[tuple[str, ...]] = [("", "first", "second", "ratio", "least", "most")]
    rows: list[tuple[str, str, float | None, float | None, Ratio | None]] = [
        (
            "tokens per CPU-second",
            ",.0f",
            first.tokens_per_cpu_s,
            second.tokens_per_cpu_s,
            report.tokens_per_cpu_s,
        ),
        ("CPU per token, us", ".2f", first.us_per_token, second.us_per_token, report.us_per_token),
        ("CPU per event, us", ".2f", first.us_per_event, second.us_per_event, report.us_per_event),
        ("time to first event p50, ms", ",.1f", first.ttft_p50_ms, second.ttft_p50_ms, None),
        ("time to first event p99, ms", ",.1f", first.ttft_p99_ms, second.ttft_p99_ms, report.ttft_p99_ms),
        ("between events p99, ms", ",.1f", first.itl_p99_ms, second.itl_p99_ms, report.itl_p99_ms),
        ("events per token", ".3f", first.events_per_token, second.events_per_token, None),
        ("events per read of the client", ",.1f", first.events_per_read, second.events_per_read, None),
        ("errors", ",.0f", first.errors, second.errors, None),
    ]
    for name, form, one, two, ratio in rows:
        values = ["-" if value is None else format(value, form) for value in (one, two)]
        ratios = ("", "", "") if ratio is None else (ratio.median, ratio.least, ratio.most)
        table.append((name, *values, *(_ratio(value) for value in ratios)))
    samples = [*first.error_samples, *second.error_samples]
    lines = [
        f"{report.machine}; load average {report.load_average:.1f}",
        f"first:  {options_line(first.options)}",
        f"        {first.protocol}",
        f"second: {options_line(changed)}",
        f"        {second.protocol}",
        f"medians of {len(first.rounds)} rounds each, by turns; ratios first / second within a round",
        "",
        *format_table(table),
    ]
    remarks = [f"note: error: {sample}" for sample in samples]
    if first.events_per_token and abs(second.events_per_token / first.events_per_token - 1) > UNEQUAL_EVENTS:
        remarks.append("note: events per token differ: a server that was behind merged tokens")
    return "\n".join(lines + (["", *remarks] if remarks else []))


def _ratio(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.3f}"
