"""``penstock bench start``: what a server costs until it is ready, and until it has ended."""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import psutil

from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.machine import Machine, this_machine
from penstock.bench.server_process import ServerProcess, serve_command
from penstock.bench.tables import format_table
from penstock.config.bench import BenchStartConfig

_POLL_S = 0.01


class StartCost(msgspec.Struct, frozen=True, kw_only=True):
    """One start and end, or the medians of several. CPU time is that of all processes; memory counts a shared
    page once in all (PSS; zero where the system does not tell)."""

    ready_cpu_s: float
    ready_s: float
    """From the command to 200 of ``/ready``."""
    total_cpu_s: float
    """With the end."""
    stop_s: float
    """From SIGTERM to the exit."""
    memory_bytes: int
    api_server_bytes: int
    """Of the largest API server."""


class StartReport(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds, by working tree; the first is this one's."""

    api_servers: int
    engines: int
    rounds: int
    starts: dict[str, StartCost]
    machine: Machine


def measure(config: BenchStartConfig, say: ProgressCallback) -> StartReport:
    """Start and end servers by turns. Raises BenchError."""
    deadline = Deadline(config.timeout)
    options = {
        "--engine": "synthetic",
        "--port": 0,
        "--api-server-count": config.api_server_count,
        "--data-parallel-size": config.engines,
    }
    arguments = serve_command(options, config.server_args)
    trees: dict[str, Path | None] = {"this version": None}
    if config.compare_tree is not None:
        trees[config.compare_tree] = Path(config.compare_tree).absolute()
    found: dict[str, list[StartCost]] = {name: [] for name in trees}
    for number in range(1, config.rounds + 1):
        for name, tree in trees.items():
            found[name].append(_round(arguments, tree, deadline))
        say(f"round {number} of {config.rounds}")
    return StartReport(
        api_servers=config.api_server_count,
        engines=config.engines,
        rounds=config.rounds,
        starts={name: _median(costs) for name, costs in found.items()},
        machine=this_machine(),
    )


def _round(arguments: list[str], tree: Path | None, deadline: Deadline) -> StartCost:
    spent, began = _ended_cpu(), time.monotonic()
    with (
        ServerProcess(arguments, deadline.left("the start of the server"), tree=tree) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        while http.get("/ready", timeout=deadline.left("the server was ready")).status_code != 200:
            time.sleep(_POLL_S)
        ready = time.monotonic()
        supervisor = psutil.Process(server.pid)
        family = [supervisor, *supervisor.children(recursive=True)]
        cpu = sum(sum(process.cpu_times()[:4]) for process in family)  # with children that have ended
        memory = {process.pid: _memory(process) for process in family}
        api_servers = [each.pid for each in family if "api-server" in " ".join(each.cmdline())]
        stopping = time.monotonic()
        server.close()
        ended = time.monotonic()
    return StartCost(
        ready_cpu_s=cpu,
        ready_s=ready - began,
        total_cpu_s=_ended_cpu() - spent,
        stop_s=ended - stopping,
        memory_bytes=sum(memory.values()),
        api_server_bytes=max((memory[pid] for pid in api_servers), default=0),
    )


def _ended_cpu() -> float:
    """CPU seconds of children that have ended, and theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _memory(process: psutil.Process) -> int:
    if sys.platform == "linux":
        with contextlib.suppress(psutil.Error):
            return int(process.memory_full_info().pss)
    return 0


def _median(costs: list[StartCost]) -> StartCost:
    def median(value: Callable[[StartCost], float]) -> float:
        return statistics.median(map(value, costs))

    return StartCost(
        ready_cpu_s=median(lambda cost: cost.ready_cpu_s),
        ready_s=median(lambda cost: cost.ready_s),
        total_cpu_s=median(lambda cost: cost.total_cpu_s),
        stop_s=median(lambda cost: cost.stop_s),
        memory_bytes=int(median(lambda cost: cost.memory_bytes)),
        api_server_bytes=int(median(lambda cost: cost.api_server_bytes)),
    )


def render(report: StartReport) -> str:
    """The report as a table."""
    machine = report.machine
    rows: list[tuple[str, ...]] = [
        ("", "CPU until ready, s", "ready, s", "CPU with the end, s", "end, s", "MB", "MB, API server")
    ]
    rows += [
        (
            name,
            *(f"{value:.2f}" for value in (cost.ready_cpu_s, cost.ready_s, cost.total_cpu_s, cost.stop_s)),
            f"{cost.memory_bytes / 1e6:.0f}",
            f"{cost.api_server_bytes / 1e6:.0f}",
        )
        for name, cost in report.starts.items()
    ]
    return "\n".join(
        (
            f"Start of {report.api_servers} API server(s) and {report.engines} engine(s), median of "
            f"{report.rounds}",
            *format_table(rows),
            "",
            f"{machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.python}",
        )
    )
