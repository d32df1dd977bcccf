"""``python -m tests.soak gateway``: whether the gateway's memory stays flat while requests fail."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import msgspec
import psutil
import uvloop

from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.errors import BenchError
from penstock.bench.server_process import ServerProcess
from tests.soak.config import GatewayMemoryConfig
from tests.soak.failure_scenarios import WEIGHTS, ModelServers, ScenarioClient
from tests.soak.leaks import MemorySample, slope

SERVERS = 3
SAMPLES = 10
FIRST_TOKEN_TIMEOUT_S = 1.0
"""Option of the gateway: duration of a request to a server that stalls."""
REST_S = 0.6
"""Pause before each sample: the gateway checks four times a second whether it may collect garbage."""
MIB = 1 << 20


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results. Slopes are medians over all pairs of samples of the second half."""

    samples: list[MemorySample]
    """One after each tenth of the requests, with none in flight."""
    kib_per_1000_requests: float
    objects_per_1000_requests: float
    outcomes: dict[str, int]
    """The gateway's request counts by outcome."""


def measure_memory(config: GatewayMemoryConfig, say: ProgressCallback) -> MemoryReport:
    """Runs the requests and ends all processes. Raises BenchError."""
    deadline = Deadline(config.timeout)
    try:
        report: MemoryReport = uvloop.run(asyncio.wait_for(_measure(config, deadline, say), config.timeout))
    except TimeoutError:
        raise BenchError(f"--timeout: {config.timeout:g} s are over before the last request") from None
    return report


async def _measure(config: GatewayMemoryConfig, deadline: Deadline, say: ProgressCallback) -> MemoryReport:
    async with ModelServers(SERVERS) as servers:
        arguments = [
            "gateway",
            "--port=0",
            "--allow-loopback-admin",
            "--access-log=none",
            "--max-request-bytes=65536",
        ]
        arguments += [f"--first-token-timeout={FIRST_TOKEN_TIMEOUT_S}", "--endpoints", *servers.urls]
        say("starting penstock gateway")
        start = asyncio.to_thread(ServerProcess, arguments, deadline.left("the start of the gateway"))
        with await start as gateway:
            rng = random.Random(config.seed)
            clients = [
                ScenarioClient(gateway.url, random.Random(rng.random())) for _ in range(config.clients)
            ]
            samples: list[MemorySample] = []
            began, asked = time.monotonic(), 0
            for number in range(1, SAMPLES + 1):
                wanted = config.requests * number // SAMPLES
                kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=wanted - asked)
                waiting = iter(kinds)
                await asyncio.gather(*(client.run(waiting) for client in clients))
                asked = wanted
                await asyncio.sleep(REST_S)
                tracked = await clients[0].tracked_objects()
                [process] = psutil.Process(gateway.pid).children()  # its only worker
                resident, descriptors = process.memory_info().rss, process.num_fds()
                samples.append(
                    MemorySample(time.monotonic() - began, asked, resident, descriptors, objects=tracked)
                )
                say(_line(samples[-1]))
            outcomes = await clients[0].outcomes()
            for client in clients:
                client.close()
    return build(samples, outcomes)


def build(samples: list[MemorySample], outcomes: Counter[str]) -> MemoryReport:
    """Builds the report."""
    half = samples[len(samples) // 2 :]
    return MemoryReport(
        samples=samples,
        kib_per_1000_requests=slope([(each.requests, each.resident_bytes) for each in half]) * 1000 / 1024,
        objects_per_1000_requests=slope([(each.requests, each.objects or 0) for each in half]) * 1000,
        outcomes=dict(outcomes),
    )


def _line(sample: MemorySample) -> str:
    return (
        f"{sample.requests:9,d} requests  {sample.resident_bytes / MIB:7.1f} MiB  "
        f"{sample.objects:9,d} objects  {sample.descriptors:5d} descriptors"
    )


def render(report: MemoryReport) -> str:
    """The report as text."""
    outcomes = [f"{name:22s} {count:9,d}" for name, count in sorted(report.outcomes.items())]
    return "\n".join(
        [
            *map(_line, report.samples),
            f"second half: {report.kib_per_1000_requests:+.1f} KiB and "
            f"{report.objects_per_1000_requests:+.1f} tracked objects per 1,000 requests",
            *outcomes,
        ]
    )
