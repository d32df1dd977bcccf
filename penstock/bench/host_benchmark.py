"""``penstock bench host``: CPU time of API servers per token, compared to a C program that only sends."""

from __future__ import annotations

import contextlib
import time

from penstock.bench import report
from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.kernel_floor import KernelFloor
from penstock.bench.load.messages import RoundResult
from penstock.bench.load.slow_readers import SlowReaders
from penstock.bench.machine import this_machine
from penstock.bench.process_usage import PeakMemory, resident_bytes, resolve_pids
from penstock.bench.report import HostReport
from penstock.bench.server_under_load import MeasuredRound, MeasuredServer, ServerUnderLoad, start_server
from penstock.config.bench import OF_STARTED_SERVER, BenchHostConfig

LEAD_BYTES = 160 * 1024
"""Bytes sent to each slow reader before the others are measured: more than the kernel buffers for a local
connection (64 KiB unsent, as API servers configure, and data in flight)."""
FLOOR_RUNS = 5
"""Measurements of the C floor before the rounds, and again after them."""
AFTER_S = 1.0
"""Time for API servers to notice closed connections and free their memory."""
NOT_SHOWN = ("json", "api_key", "timeout", "rounds", "compare_with")
"""Options that affect neither load nor server."""


def measure(config: BenchHostConfig, say: ProgressCallback) -> HostReport:
    """Run the measurement and end all its processes; ``say`` gets a line for each stage.

    Raises BenchError when it is impossible or exceeds its time limit. Failed requests are counted instead.
    """
    deadline = Deadline(config.timeout)
    with contextlib.ExitStack() as stack:
        server = _server(config, deadline, stack, say)
        api_servers = server.processes.api_servers
        floor = stack.enter_context(KernelFloor())
        memory = stack.enter_context(PeakMemory(api_servers))
        slow = None
        with contextlib.ExitStack() as connected:
            load = ServerUnderLoad(config, server, connected, deadline)
            facts, plan, endless = load.prepared
            chunk = _warm_up(load, deadline, say)
            floors = _measure_floor(floor, config, chunk, deadline, say)
            rounds = _measure_rounds(config, load, deadline, say)
            resident, peak = resident_bytes(api_servers), memory.peak
            if config.slow_readers:
                say(f"starting {config.slow_readers:,} slow readers")
                without = [one.load for one in rounds]
                with SlowReaders(plan, endless, config.slow_readers) as readers:
                    beside, grown = _measure_beside(config, load, without, deadline)
                say("slow readers disconnected")
                without += _plain_rounds(config, load, deadline)
                slow = report.slow_reading(config.slow_readers, readers.cut, without, beside, grown)
            floors += _measure_floor(floor, config, chunk, deadline, say)
        time.sleep(AFTER_S)
        after = resident_bytes(api_servers)
    subject = report.Subject(
        protocol=protocol_of(config),
        model=facts.model,
        prompt_tokens=facts.prompt_tokens,
        tokens_per_request=config.tokens,
        api_servers=len(api_servers),
        engines=len(server.processes.engines),
        api_server_resident_bytes=resident,
        options=options_shown(config),
    )
    per_stream = (peak - memory.before) / config.in_flight
    used = report.StreamMemory(memory.before, peak, after, per_stream)
    return report.build(rounds, floors, subject, this_machine(), used, slow)


def _server(
    config: BenchHostConfig, deadline: Deadline, stack: contextlib.ExitStack, say: ProgressCallback
) -> MeasuredServer:
    """The measured server, which is started unless ``--url`` is given."""
    if config.url is not None:
        base = config.url.rstrip("/").removesuffix("/v1")
        return MeasuredServer(base, resolve_pids(config.pid or []))
    say("starting penstock serve --engine synthetic")
    return start_server(config, config.api_server_count[0], stack, deadline)


def _measure_beside(
    config: BenchHostConfig,
    load: ServerUnderLoad,
    without: list[RoundResult],
    deadline: Deadline,
) -> tuple[list[RoundResult], int]:
    """Repeats the rounds once the kernel's buffers of the slow readers are full.

    Returns the rounds, and the growth of the API servers' memory in bytes.
    """
    api_servers = load.processes.api_servers
    resident = resident_bytes(api_servers)
    sent_per_s = sum(one.bytes for one in without) / sum(one.wall_s for one in without) / config.in_flight
    lead = time.monotonic() + LEAD_BYTES / max(sent_per_s, 1.0)
    while time.monotonic() < lead:
        load.run(deadline.left("the slow readers' lead"), keep=False)
    beside = _plain_rounds(config, load, deadline)
    return beside, resident_bytes(api_servers) - resident


def _plain_rounds(config: BenchHostConfig, load: ServerUnderLoad, deadline: Deadline) -> list[RoundResult]:
    """Rounds of which only the latencies are used."""
    return [load.run(deadline.left("another round"), keep=False).load for _ in range(config.rounds)]


def _warm_up(load: ServerUnderLoad, deadline: Deadline, say: ProgressCallback) -> int:
    """Run a round that is not measured. Returns the mean size of an event in bytes."""
    say("warm-up round")
    warm = load.run(deadline.left("the warm-up"), keep=False).load
    return max(1, round(warm.bytes / max(1, warm.events)))


def _measure_rounds(
    config: BenchHostConfig, load: ServerUnderLoad, deadline: Deadline, say: ProgressCallback
) -> list[MeasuredRound]:
    rounds = []
    for number in range(1, config.rounds + 1):
        rounds.append(load.run(deadline.left(f"round {number}")))
        say(f"round {number} of {config.rounds}: {rounds[-1].tokens_per_cpu_s:,.0f} tokens per CPU-second")
    return rounds


def _measure_floor(
    floor: KernelFloor, config: BenchHostConfig, chunk: int, deadline: Deadline, say: ProgressCallback
) -> list[float]:
    if not floor.available:
        say("no C floor: it needs a C compiler (cc), which is not installed; all else is measured")
        return []
    say(f"C floor: sends of {chunk} bytes over {config.streams:,} sockets")
    return floor.measure(config.streams, chunk, times=FLOOR_RUNS, seconds=deadline.left("the C floor"))


def protocol_of(config: BenchHostConfig) -> str:
    """The protocol of the load and its connections, in words."""
    name = "HTTP/2" if config.http2 else "HTTP/1.1"
    return f"{name}{' with TLS' if config.tls else ''} over {config.load_connections:,} connections"


def options_shown(config: BenchHostConfig) -> dict[str, object]:
    """The options that affect the results."""
    hidden = set(NOT_SHOWN)
    hidden |= {"url", "pid"} if config.url is None else set(OF_STARTED_SERVER)
    values = dict(vars(config))
    if config.http2:
        values["connections"] = config.load_connections
    values |= {"requests": config.requests_per_round, "concurrency": config.in_flight}
    return {name: value for name, value in values.items() if value is not None and name not in hidden}
