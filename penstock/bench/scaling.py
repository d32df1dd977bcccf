"""``penstock bench host --api-server-count 1,2,4``: CPU time per token by number of API servers.

Also extrapolates the load of the shared processes (engines, coordinator, supervisor) to many API servers.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from penstock.bench import host_benchmark
from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.machine import Machine, this_machine
from penstock.bench.process_usage import cpu_time
from penstock.bench.server_under_load import MeasuredRound, ServerUnderLoad, start_server
from penstock.bench.tables import format_table, options_line
from penstock.config.bench import BenchHostConfig

SIMULATED = 64
"""API servers of the extrapolation."""
LOADS_PER_S = 10
"""Load reports of a busy engine to the coordinator, and of the coordinator to each API server, see
:mod:`penstock.coordinator.state`."""


class ScalingSample(msgspec.Struct, frozen=True):
    """One round on one server. ``coordinator_cpu_s``: CPU seconds of the coordinator during the round."""

    round: MeasuredRound
    coordinator_cpu_s: float

    @property
    def us_per_token(self) -> float:
        return 1e6 / self.round.tokens_per_cpu_s if self.round.tokens_per_cpu_s else 0.0


class ScalingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Results for one number of API servers.

    ``us_per_token``: CPU time of all API servers, median over the rounds. ``ratio``: median of the ratios to
    the first number of API servers in the same round. Ratios are comparable only at equal
    ``events_per_token``, because a server that is behind merges tokens. ``engine_ms_per_step``: CPU time of
    an engine per step with all its streams running. ``coordinator_share``: fraction of one core.
    ``supervisor_us_per_connection``: None for one API server, which accepts connections itself.
    """

    api_servers: int
    streams: int
    us_per_token: float
    ratio: float
    events_per_token: float
    engine_ms_per_step: float
    coordinator_share: float
    supervisor_us_per_connection: float | None
    samples: list[ScalingSample]


class Extrapolation(msgspec.Struct, frozen=True, kw_only=True):
    """A round's streams on :data:`SIMULATED` API servers with a core each, extrapolated from the points.

    Linear in CPU time per token and per engine step; the coordinator's CPU time per message and the
    supervisor's per connection are constant. ``engine_tokens_per_s`` is the limit of one engine by the host's
    work. With --grow-load every API server has --streams of its own, all on the same engines.
    """

    api_servers: int
    us_per_token: float
    tokens_per_s: float
    engine_ms_per_step: float
    engine_tokens_per_s: float
    coordinator_messages_per_s: float
    coordinator_share: float
    connections_per_s: float | None


class ScalingReport(msgspec.Struct, frozen=True, kw_only=True):
    points: list[ScalingPoint]
    limit: Extrapolation
    errors: int
    options: dict[str, Any]
    machine: Machine


class _ScaledServer:
    """A server with so many API servers and its load client, during the measurement."""

    def __init__(
        self,
        config: BenchHostConfig,
        api_servers: int,
        stack: contextlib.ExitStack,
        deadline: Deadline,
    ) -> None:
        if config.grow_load:
            connections = config.load_connections * api_servers if config.http2 else None
            config = replace(config, streams=config.streams * api_servers, connections=connections)
        self.config = config
        server = start_server(config, api_servers, stack, deadline)
        self._coordinators = server.processes.coordinators
        self._load = ServerUnderLoad(config, server, stack, deadline)
        accepting = 1e6 * self._load.accepting.total / config.load_connections
        self.us_per_connection = accepting if api_servers > 1 else None

    def run(self, seconds: float) -> ScalingSample:
        before = cpu_time(self._coordinators)
        measured = self._load.run(seconds)
        return ScalingSample(measured, (cpu_time(self._coordinators) - before).total)


def measure(config: BenchHostConfig, say: ProgressCallback) -> ScalingReport:
    """Run the rounds for all numbers of API servers by turns. Raises BenchError."""
    deadline = Deadline(config.timeout)
    with contextlib.ExitStack() as stack:
        servers = []
        for count in config.api_server_count:
            say(f"starting penstock serve --engine synthetic --api-server-count {count}")
            servers.append(_ScaledServer(config, count, stack, deadline))
        for server in servers:
            server.run(deadline.left("the warm-up"))
        samples: list[list[ScalingSample]] = [[] for _ in servers]
        for number in range(1, config.rounds + 1):
            for server, taken in zip(servers, samples, strict=True):
                taken.append(server.run(deadline.left(f"round {number}")))
            costs = ", ".join(f"{taken[-1].us_per_token:.2f}" for taken in samples)
            say(f"round {number} of {config.rounds}: {costs} microseconds per token")
    points = [
        point(server.config, count, taken, samples[0], server.us_per_connection)
        for count, server, taken in zip(config.api_server_count, servers, samples, strict=True)
    ]
    return ScalingReport(
        points=points,
        limit=limit(config, points),
        errors=sum(sample.round.load.errors for taken in samples for sample in taken),
        options=host_benchmark.options_shown(config),
        machine=this_machine(),
    )


def point(
    config: BenchHostConfig,
    api_servers: int,
    samples: Sequence[ScalingSample],
    first: Sequence[ScalingSample],
    us_per_connection: float | None,
) -> ScalingPoint:
    """``first``: samples of the same rounds to compare with. Rounds without tokens have no ratio."""
    ratios = [
        own.us_per_token / other.us_per_token
        for own, other in zip(samples, first, strict=True)
        if other.us_per_token
    ]
    loads = [sample.round.load for sample in samples]
    tokens = sum(load.requests for load in loads) * config.tokens
    wall_s = sum(load.wall_s for load in loads)
    engine_s = sum(sample.round.engine_cpu_s.total for sample in samples)
    return ScalingPoint(
        api_servers=api_servers,
        streams=config.in_flight,
        us_per_token=statistics.median(sample.us_per_token for sample in samples),
        ratio=statistics.median(ratios) if ratios else 0.0,
        events_per_token=sum(load.events for load in loads) / tokens,
        engine_ms_per_step=1000 * engine_s / (tokens / _rows(config)),
        coordinator_share=sum(sample.coordinator_cpu_s for sample in samples) / wall_s,
        supervisor_us_per_connection=us_per_connection,
        samples=list(samples),
    )


def limit(config: BenchHostConfig, points: Sequence[ScalingPoint]) -> Extrapolation:
    """Extrapolates from at least two points."""
    counts = [float(each.api_servers) for each in points]
    us_per_token = _extrapolate(counts, [each.us_per_token for each in points])
    step_ms = _extrapolate(counts, [each.engine_ms_per_step for each in points])
    with_coordinator = [each for each in points if each.api_servers > 1 or config.engines > 1]
    carried = sum(coordinator_messages(each.api_servers, config.engines) for each in with_coordinator)
    per_message = sum(each.coordinator_share for each in with_coordinator) / carried
    messages = coordinator_messages(SIMULATED, config.engines)
    rows = _rows(config) * (SIMULATED if config.grow_load else 1)
    accepts = [us for each in points if (us := each.supervisor_us_per_connection)]
    return Extrapolation(
        api_servers=SIMULATED,
        us_per_token=us_per_token,
        tokens_per_s=SIMULATED * 1e6 / us_per_token if us_per_token else 0.0,
        engine_ms_per_step=step_ms,
        engine_tokens_per_s=1000 * rows / step_ms if step_ms else 0.0,
        coordinator_messages_per_s=messages,
        coordinator_share=per_message * messages,
        connections_per_s=1e6 / statistics.median(accepts) if accepts else None,
    )


def coordinator_messages(api_servers: int, engines: int) -> float:
    """Messages that a coordinator receives and sends per second while all engines are busy.

    Each API server sends ServerJoin and its metrics once a second. The coordinator forwards these metrics to
    all others, and its own to all. Engines report their load; the coordinator sends the loads of all engines
    to each API server in one message.
    """
    received = 2 * api_servers + LOADS_PER_S * engines
    sent = api_servers * (api_servers - 1) + api_servers + LOADS_PER_S * api_servers
    return float(received + sent)


def _rows(config: BenchHostConfig) -> float:
    """Rows of an engine's step while all requests run."""
    return config.in_flight / config.engines


def _extrapolate(counts: Sequence[float], values: Sequence[float]) -> float:
    """The value at :data:`SIMULATED` by linear regression, with a slope of at least 0."""
    slope = max(0.0, statistics.linear_regression(counts, values).slope)
    return statistics.mean(values) + slope * (SIMULATED - statistics.mean(counts))


def render(report: ScalingReport) -> str:
    """The report as text for a terminal, without a newline at its end."""
    far = report.limit
    table = [("API servers", "streams", "us/token", "ratio", "events/token", "engine ms/step", "coordinator")]
    for each in report.points:
        table.append(
            (
                str(each.api_servers),
                f"{each.streams:,}",
                f"{each.us_per_token:.2f}",
                f"{each.ratio:.3f}",
                f"{each.events_per_token:.2f}",
                f"{each.engine_ms_per_step:.3f}",
                f"{each.coordinator_share:.2%}",
            )
        )
    accepted = "-" if far.connections_per_s is None else f"{far.connections_per_s:,.0f}"
    lines = [
        str(report.machine),
        options_line(report.options),
        "",
        *format_table(table),
        "",
        f"computed for {far.api_servers} API servers with a core each:",
        f"  API servers: {far.us_per_token:.2f} microseconds per token, "
        f"{far.tokens_per_s:,.0f} tokens per second",
        f"  engine: {far.engine_ms_per_step:.3f} ms of host work per step, "
        f"{far.engine_tokens_per_s:,.0f} tokens per second",
        f"  coordinator: {far.coordinator_messages_per_s:,.0f} messages per second, "
        f"{far.coordinator_share:.1%} of a core",
        f"  supervisor: {accepted} connections per second",
    ]
    return "\n".join(lines + ([f"note: {report.errors:,} requests failed"] if report.errors else []))
