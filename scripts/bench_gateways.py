"""Measure the gateway beside vllm-router and SMG, by turns, in front of the same synthetic server.

    python -m scripts.bench_gateways [--only request,event] [--turns 5] [--quick] [--peers DIRECTORY]

All gateways of a workload run at the same time and are loaded by turns, by one load client: what the machine
does besides falls on all. Prints a table of medians, and of ratios to vllm-router in the same turn.
``DIRECTORY`` is the environment with the others' programs; without one Penstock's gateway is measured alone.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from penstock.bench.deadline import Deadline
from penstock.bench.process_usage import (
    ServerPids,
    cpu_time,
    pids_of_gateway,
)
from penstock.bench.server_process import ServerProcess, serve_arguments
from penstock.bench.server_under_load import MeasuredServer, ServerUnderLoad
from penstock.bench.tables import format_table
from scripts.bench_against import SHORT, START_S, Workload, whole_replies
from scripts.idle_streams import RefusedError, idle_cost, silent_server, stream_count

REFERENCE = "vllm-router"
IDLE = "idle"
"""The workload of streams in which nothing comes."""


class Started(NamedTuple):
    """A gateway that runs."""

    url: str
    processes: ServerPids


Start = Callable[[str, contextlib.ExitStack], Started]
"""Starts a gateway in front of the server of a URL; the stack ends it."""


@dataclass(frozen=True)
class GatewayWorkload(Workload):
    """What is asked of all gateways."""

    unit: str = "request"
    """What the figure is: ``request`` or ``event``, microseconds of CPU for each; ``ttft``, milliseconds to
    the first token of a burst."""

    def _requests(self, *, quick: bool) -> int:
        return super()._requests(quick=quick and self.unit == "request")  # others are of so many streams


CHAT = {"endpoint": "chat"}
WORKLOADS = [
    GatewayWorkload(
        "request", "short request, not streamed", {**SHORT, "prompt_tokens": 8}, 2000, whole=True
    ),
    GatewayWorkload("stream", "stream of one token", {**SHORT, "prompt_tokens": 8}, 2000),
    GatewayWorkload("body", "2,000 words, not streamed", {**SHORT, "prompt_tokens": 2600}, 500, whole=True),
    GatewayWorkload(
        "event",
        "event, 128 streams, every 40 ms",
        {**CHAT, "streams": 128, "step_ms": 40.0},
        256,
        unit="event",
    ),
    GatewayWorkload("burst-128", "TTFT, burst of 128", {**SHORT, "streams": 128}, 128, unit="ttft"),
    GatewayWorkload("burst-1024", "TTFT, burst of 1,024", {**SHORT, "streams": 1024}, 1024, unit="ttft"),
]


def free_port() -> int:
    """A port that was free a moment ago: the others cannot be given 0 and asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def penstock(*options: str) -> Start:
    """Penstock's gateway with these options."""

    def start(server: str, stack: contextlib.ExitStack) -> Started:
        arguments = ["gateway", "--port=0", *options, "--endpoints", server]
        process = stack.enter_context(ServerProcess(arguments, START_S))
        return Started(process.url, pids_of_gateway(process.pid))

    return start


def peer(*command: str) -> Start:
    """Another gateway: ``command`` takes a server and a port."""

    def start(server: str, stack: contextlib.ExitStack) -> Started:
        port, metrics_port = free_port(), free_port()
        arguments = [*command, "--worker-urls", server, "--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        process = stack.enter_context(running(arguments))
        url = f"http://127.0.0.1:{port}"
        until_it_answers(url, process)
        return Started(url, ServerPids((process.pid, *(each.pid for each in children(process.pid)))))

    return start


@contextlib.contextmanager
def running(arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program, and all that it starts, for as long as it is measured."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        family = children(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.kill()
        process.wait()


def children(pid: int) -> list[psutil.Process]:
    """All processes that a program has started; none if it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a chat comes back."""
    until = time.monotonic() + START_S
    with httpx.Client(base_url=url, trust_env=False, timeout=5.0) as client:
        while time.monotonic() < until:
            if process.poll() is not None:
                raise SystemExit(f"{process.args!r} has ended with {process.returncode}")
            with contextlib.suppress(httpx.HTTPError, KeyError, ValueError, IndexError):
                model = client.get("/v1/models").json()["data"][0]["id"]
                chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
                if client.post("/v1/chat/completions", json=chat).status_code == 200:
                    return
            time.sleep(0.2)
    raise SystemExit(f"{process.args!r} did not answer in {START_S:.0f} s")


def turns_of(
    workload: GatewayWorkload, gateway: Started, server: str, stack: contextlib.ExitStack, *, quick: bool
) -> Callable[[], list[float]]:
    """What loads a gateway in front of ``server`` for a turn, and gives its figures."""
    config, pids = workload.config(quick=quick), gateway.processes.api_servers
    deadline = Deadline(config.timeout)
    if workload.whole:
        measure = stack.enter_context(whole_replies(config, gateway.url, server))

        def whole() -> list[float]:
            before = cpu_time(pids).total
            measure()
            return [(cpu_time(pids).total - before) / config.requests_per_round * 1e6]

        return whole

    measured = MeasuredServer(gateway.url, gateway.processes, behind=server)
    load = ServerUnderLoad(config, measured, stack, deadline)

    def streamed() -> list[float]:
        result = load.run(deadline.left("a turn"), keep=False)
        found, cpu_us = result.load, result.api_server_cpu_s.total * 1e6
        if found.errors:
            raise SystemExit(f"{workload.name}: {found.error_samples[0]}")
        if workload.unit == "ttft":
            return [found.ttft_ms.p50 or 0.0, found.ttft_ms.p99 or 0.0]
        return [cpu_us / (config.requests_per_round if workload.unit == "request" else found.events)]

    return streamed


def measure(
    workload: GatewayWorkload, gateways: dict[str, Start], turns: int, *, quick: bool
) -> dict[str, list[list[float]]]:
    """Figures of each gateway, by turn."""
    found: dict[str, list[list[float]]] = {name: [] for name in gateways}
    with contextlib.ExitStack() as stack:
        config = workload.config(quick=quick)
        server = stack.enter_context(ServerProcess(serve_arguments(config), START_S))
        loads = {
            name: turns_of(workload, start(server.url, stack), server.url, stack, quick=quick)
            for name, start in gateways.items()
        }
        for load in loads.values():
            load()  # warm-up
        names = list(loads)
        for _ in range(turns):
            for name in names:
                found[name].append(loads[name]())
            names.append(names.pop(0))  # who begins changes
    return found


def rows(workload: GatewayWorkload, found: dict[str, list[list[float]]]) -> Iterator[list[str]]:
    """Lines of the table: the median of each gateway, and its ratio to the reference."""
    unit = "ms" if workload.unit == "ttft" else "µs"
    for index, part in enumerate(("p50", "p99") if workload.unit == "ttft" else ("",)):
        cells = []
        for name, turns in found.items():
            cell = f"{statistics.median(turn[index] for turn in turns):.3g} {unit}"
            if name != REFERENCE and REFERENCE in found:
                pairs = zip(turns, found[REFERENCE], strict=True)
                ratio = statistics.median(ours[index] / theirs[index] for ours, theirs in pairs)
                cell += f" ({ratio:.2f} x)"
            cells.append(cell)
        yield [f"{workload.text} {part}".strip(), *cells]


def idle_rows(gateways: dict[str, Start], *, quick: bool) -> Iterator[list[str]]:
    """Lines of the table: what streams cost in which nothing comes; once, as memory is not given back."""
    streams = stream_count() // (8 if quick else 1)
    memory, cpu = list[str](), list[str]()
    for start in gateways.values():
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(silent_server(streams, START_S))
            gateway = start(server, stack)
            try:
                cost = idle_cost(gateway.url, gateway.processes, streams)
            except RefusedError as refusal:
                memory.append(f"refused: {refusal}")
                cpu.append("")
                continue
            memory.append(f"{cost.kib:.1f} KiB")
            cpu.append(f"{cost.cpu_ms:.3g} ms/s")
            print(memory[-1], cpu[-1], sep=" | ", flush=True)
    yield [f"memory of a stream, {streams:,} idle", *memory]
    yield ["CPU time of all while idle", *cpu]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join([*(each.name for each in WORKLOADS), IDLE])
    parser.add_argument("--only", default="", help=f"workloads, separated by commas, of {known}")
    parser.add_argument("--turns", type=int, default=5, help="turns per workload (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="an eighth of the requests")
    parser.add_argument("--peers", type=Path, help="environment with vllm-router and smg")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name]
    if unknown := set(names) - {IDLE, *(each.name for each in WORKLOADS)}:
        parser.error(f"there are the workloads {known}, not {', '.join(sorted(unknown))}")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gateways = {
        "penstock": penstock(),
        "penstock, HTTP/1.1 to servers": penstock("--upstream-http2", "off"),
    }
    if options.peers is not None:
        programs = options.peers.resolve() / "bin"
        gateways[REFERENCE] = peer(str(programs / "vllm-router"))
        gateways["smg"] = peer(str(programs / "smg"), "launch")
    lines: list[list[str]] = []
    for workload in WORKLOADS:
        if not names or workload.name in names:
            found = measure(workload, gateways, options.turns, quick=options.quick)
            lines += rows(workload, found)
            print(*lines[-1], sep=" | ", flush=True)
    if not names or IDLE in names:
        lines += idle_rows(gateways, quick=options.quick)
    print("", *format_table([["workload", *gateways], *lines]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
