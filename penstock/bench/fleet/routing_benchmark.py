"""``penstock bench routing``: times to first token in a simulated fleet, by the choice of servers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np

from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.errors import BenchError
from penstock.bench.fleet.policies import OTHERS, OwnPicker
from penstock.bench.fleet.simulated_server import ServerModel
from penstock.bench.fleet.simulation import simulate
from penstock.bench.fleet.traces import TRACES, make_trace
from penstock.bench.tables import format_table
from penstock.config.bench import BenchRoutingConfig

OWN = "penstock"
WITHOUT_SESSIONS = "penstock, no session"
"""Penstock's picker where clients name no session."""


class RoutingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one trace. Times are milliseconds of the simulation."""

    trace: str
    policy: str
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    ttft_mean_ms: float
    cached_share: float
    """Prompt tokens that a prefix cache had, of all."""
    busiest: float
    """Requests at the busiest server, as a multiple of the mean."""
    requests: int


class RoutingReport(msgspec.Struct, frozen=True, kw_only=True):
    """All traces and policies."""

    servers: int
    figures: list[RoutingFigures]


def measure(config: BenchRoutingConfig, say: ProgressCallback) -> RoutingReport:
    """Run the simulations. Raises BenchError when the time is over, and for an empty trace."""
    deadline = Deadline(config.timeout)
    return RoutingReport(servers=config.servers, figures=list(_simulate_all(config, deadline, say)))


def _simulate_all(
    config: BenchRoutingConfig, deadline: Deadline, say: ProgressCallback
) -> Iterator[RoutingFigures]:
    policies = {
        OWN: lambda servers, rng: OwnPicker(servers, rng, config.scorers),
        WITHOUT_SESSIONS: lambda servers, rng: OwnPicker(servers, rng, config.scorers, sessions=False),
        **OTHERS,
    }
    for name in config.traces:
        trace = make_trace(TRACES[name], config.servers, config.duration, config.load, config.seed)
        if not trace:
            raise BenchError(f"--duration: no conversation of {name} begins within {config.duration:g} s")
        for policy, make in policies.items():
            say(f"simulating {policy} on {name}")
            chosen = make(config.servers, random.Random(config.seed))
            check = partial(deadline.left, f"the end of {policy} on {name}")
            result = simulate(chosen, config.servers, trace, ServerModel(), check)
            ttft_ms = result.ttft_s * 1e3
            p50, p90, p99 = np.percentile(ttft_ms, [50, 90, 99]).tolist()
            yield RoutingFigures(
                trace=name,
                policy=policy,
                ttft_p50_ms=p50,
                ttft_p90_ms=p90,
                ttft_p99_ms=p99,
                ttft_mean_ms=float(ttft_ms.mean()),
                cached_share=result.cached_share,
                busiest=result.busiest,
                requests=ttft_ms.size,
            )


def render(report: RoutingReport) -> str:
    """The report as tables, one for each trace."""
    lines = [f"{report.servers} simulated servers; time to first token in milliseconds"]
    for name in dict.fromkeys(each.trace for each in report.figures):
        chosen = [each for each in report.figures if each.trace == name]
        rows = [["", "p50", "p90", "p99", "mean", "cached", "busiest"]]
        rows += [
            [
                each.policy,
                *(f"{ms:.0f}" for ms in (each.ttft_p50_ms, each.ttft_p90_ms, each.ttft_p99_ms)),
                f"{each.ttft_mean_ms:.0f}",
                f"{each.cached_share:.1%}",
                f"{each.busiest:.2f} x",
            ]
            for each in chosen
        ]
        lines += ["", f"{name}: {chosen[0].requests:,} requests", *format_table(rows)]
    return "\n".join(lines)
