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
    """One of the two measurements."""

    protocol: str
    options: dict[str, Any]
    errors: int
    error_samples: list[str]
    rounds: list[MeasuredRound]


Figure = Callable[[MeasuredRound], float | None]


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One figure: its median over the rounds of both, and ratios of the first to the second in a round.

    None where no round has the figure.
    """

    first: float | None
    second: float | None
    ratio: float | None
    """The median."""
    least: float | None
    most: float | None

    @classmethod
    def of(cls, figure: Figure, first: Sequence[MeasuredRound], second: Sequence[MeasuredRound]) -> Compared:
        """``figure`` of as many rounds of both."""
        pairs = [(figure(one), figure(two)) for one, two in zip(first, second, strict=True)]
        ratios = [one / two for one, two in pairs if one is not None and two]
        return cls(
            first=_median(one for one, _ in pairs),
            second=_median(two for _, two in pairs),
            ratio=_median(ratios),
            least=min(ratios, default=None),
            most=max(ratios, default=None),
        )


class ComparisonReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results. CPU times are those of the API servers, or of the gateway.

    ``changes``: the options of the second measurement that differ, as given. ``events_per_read``: events that
    the load client got in one read. ``load_average``: that of the machine in the last minute, with this
    measurement.
    """

    changes: str
    tokens_per_cpu_s: Compared
    us_per_token: Compared
    us_per_event: Compared
    ttft_p50_ms: Compared
    ttft_p99_ms: Compared
    itl_p99_ms: Compared
    events_per_token: Compared
    events_per_read: Compared
    errors: int
    first: Side
    second: Side
    load_average: float
    machine: Machine


def measure(config: BenchHostConfig, other: BenchHostConfig, say: ProgressCallback) -> ComparisonReport:
    """Run both by turns: on one server, if its options are the same. Raises BenchError."""
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
        first, second = run_by_turns(sides[0], sides[1], deadline, say)
    return build(
        config.compare_with or "",
        side(config, options_shown(config), first),
        side(other, options_shown(other), second),
    )


def run_by_turns(
    first: ServerUnderLoad, second: ServerUnderLoad, deadline: Deadline, say: ProgressCallback
) -> tuple[list[MeasuredRound], list[MeasuredRound]]:
    """The rounds of both, as many as the first is to have. Raises BenchError."""
    turns: list[tuple[ServerUnderLoad, list[MeasuredRound]]] = [(first, []), (second, [])]
    for load, _ in turns:
        load.run(deadline.left("the warm-up"), keep=False)
    for number in range(1, first.config.rounds + 1):
        # Each is the first of its round in every other round.
        for load, rounds in turns if number % 2 else reversed(turns):
            rounds.append(load.run(deadline.left(f"round {number}")))
        costs = ", ".join(_shown(us_per_token(rounds[-1]), ".2f") for _, rounds in turns)
        say(f"round {number} of {first.config.rounds}: {costs} microseconds per token")
    return turns[0][1], turns[1][1]


def build(changes: str, first: Side, second: Side) -> ComparisonReport:
    """The report over as many rounds of both."""

    def compared(figure: Figure) -> Compared:
        return Compared.of(figure, first.rounds, second.rounds)

    return ComparisonReport(
        changes=changes,
        tokens_per_cpu_s=compared(lambda each: each.tokens_per_cpu_s),
        us_per_token=compared(us_per_token),
        us_per_event=compared(us_per_event),
        ttft_p50_ms=compared(lambda each: each.load.ttft_ms.p50),
        ttft_p99_ms=compared(lambda each: each.load.ttft_ms.p99),
        itl_p99_ms=compared(lambda each: each.load.itl_ms.p99),
        events_per_token=compared(lambda each: each.load.events / each.tokens if each.tokens else None),
        events_per_read=compared(
            lambda each: each.load.events / each.load.reads if each.load.reads else None
        ),
        errors=first.errors + second.errors,
        first=first,
        second=second,
        load_average=os.getloadavg()[0],
        machine=this_machine(),
    )


def us_per_token(each: MeasuredRound) -> float | None:
    """CPU microseconds per token."""
    return 1e6 / each.tokens_per_cpu_s if each.tokens_per_cpu_s else None


def us_per_event(each: MeasuredRound) -> float | None:
    """CPU microseconds per event."""
    return 1e6 * each.api_server_cpu_s.total / each.load.events if each.load.events else None


def side(config: BenchHostConfig, options: dict[str, Any], rounds: list[MeasuredRound]) -> Side:
    """One measurement with its rounds."""
    loads = [each.load for each in rounds]
    return Side(
        protocol=protocol_of(config),
        options=options,
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
    rows = [
        ("tokens per CPU-second", ",.0f", report.tokens_per_cpu_s),
        ("CPU per token, us", ",.2f", report.us_per_token),
        ("CPU per event, us", ",.2f", report.us_per_event),
        ("time to first event p50, ms", ",.1f", report.ttft_p50_ms),
        ("time to first event p99, ms", ",.1f", report.ttft_p99_ms),
        ("between events p99, ms", ",.1f", report.itl_p99_ms),
        ("events per token", ",.3f", report.events_per_token),
        ("events per read of the client", ",.1f", report.events_per_read),
    ]
    table: list[tuple[str, ...]] = [("", "first", "second", "ratio", "least", "most")]
    for name, form, each in rows:
        figures = (_shown(each.first, form), _shown(each.second, form))
        table.append((name, *figures, *(_shown(one, ".3f") for one in (each.ratio, each.least, each.most))))
    table.append(("errors", str(first.errors), str(second.errors), "", "", ""))
    lines = [
        f"{report.machine}; load average {report.load_average:.1f}",
        f"first:  {options_line(first.options)}",
        f"        {first.protocol}",
        f"second: the same with {report.changes}",
        f"        {second.protocol}",
        f"medians of {len(first.rounds)} rounds each, by turns; ratios first / second within a round",
        "",
        *format_table(table),
    ]
    remarks = [f"note: error: {sample}" for sample in (*first.error_samples, *second.error_samples)]
    merged = report.events_per_token.ratio
    alike = first.options.get("tokens_per_step") == second.options.get("tokens_per_step")
    if alike and merged is not None and abs(merged - 1) > UNEQUAL_EVENTS:
        remarks.append("note: events per token differ: a server that was behind merged tokens")
    return "\n".join(lines + (["", *remarks] if remarks else []))


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
