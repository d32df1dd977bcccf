"""``penstock bench gateway``: CPU time per relayed event and per choice of an endpoint."""

from __future__ import annotations

import contextlib
import random
import shlex
import statistics
import time

import msgspec

from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.host_benchmark import measure
from penstock.bench.report import HostReport
from penstock.bench.server_process import ServerProcess, serve_arguments
from penstock.config.bench import BenchGatewayConfig, BenchHostConfig

PICKED_ENDPOINTS = 64
PICKED_WEIGHTS = {"queue": 2.0, "running": 1.0, "kv": 1.0, "prefix": 2.0}
PICKED_PROMPT_BYTES = 8000
"""About 2,000 tokens."""
PICKS = 2000
PICK_RUNS = 5


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results. ``relay`` has all figures of the load; in it, the API server is the gateway."""

    cpu_us_per_event: float
    """CPU time of the gateway per relayed event, including the requests."""
    cpu_us_per_pick: float
    """CPU time to choose one of 64 endpoints with four scorers for a prompt of 8,000 bytes."""
    resident_bytes: int
    errors: int
    relay: HostReport


def measure_gateway(config: BenchGatewayConfig, say: ProgressCallback) -> GatewayReport:
    """Runs the measurement and ends all its processes. Raises BenchError."""
    deadline = Deadline(config.timeout)
    with contextlib.ExitStack() as stack:
        urls = []
        for number in range(config.servers):
            say(f"starting model server {number + 1} of {config.servers}")
            server = BenchHostConfig(
                step_ms=config.step_ms, concurrency=config.streams, streams=config.streams
            )
            started = ServerProcess(serve_arguments(server), deadline.left("the start of a model server"))
            urls.append(stack.enter_context(started).url)
        say("starting penstock gateway")
        arguments = ["gateway", "--port=0", *shlex.split(config.gateway_args or ""), "--endpoints", *urls]
        gateway = stack.enter_context(ServerProcess(arguments, deadline.left("the start of the gateway")))
        relay = measure(
            BenchHostConfig(
                streams=config.streams,
                tokens=config.tokens,
                endpoint=config.endpoint,
                rounds=config.rounds,
                url=gateway.url,
                pid=[gateway.pid],
                timeout=deadline.left("the load"),
            ),
            say,
        )
    events = relay.events_per_request * relay.requests
    return GatewayReport(
        cpu_us_per_event=relay.api_server_cpu_s.total / events * 1e6 if events else 0.0,
        cpu_us_per_pick=pick_cost_us(),
        resident_bytes=relay.subject.api_server_resident_bytes,
        errors=relay.errors,
        relay=relay,
    )


def pick_cost_us(picks: int = PICKS, runs: int = PICK_RUNS) -> float:
    """CPU microseconds per choice, including the hash of the prompt: the median of ``runs`` runs."""
    from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
    from penstock.gateway.routing.picker import Picker, PickRequest
    from penstock.gateway.routing.prefix_affinity import prefix_blocks

    rng = random.Random(0)
    endpoints = [Endpoint(f"http://10.0.0.{number}:8000") for number in range(PICKED_ENDPOINTS)]
    for endpoint in endpoints:
        endpoint.scrape_succeeded(EndpointLoad(rng.randrange(5), rng.randrange(100), rng.random()), 0.0)
    prompts = [rng.randbytes(PICKED_PROMPT_BYTES) for _ in range(200)]
    picker = Picker(PICKED_WEIGHTS, rng=rng)
    costs = []
    for _ in range(runs):
        began = time.process_time()
        for number in range(picks):
            blocks = prefix_blocks("model", prompts[number % len(prompts)])
            picker.pick(PickRequest(blocks=blocks), endpoints, 1.0)
        costs.append((time.process_time() - began) / picks * 1e6)
    return statistics.median(costs)


def render(report: GatewayReport) -> str:
    """The report as a table."""
    relay = report.relay
    floor = relay.floor_sends_per_cpu_s
    lines = [
        f"CPU per relayed event    {report.cpu_us_per_event:6.1f} microseconds, requests included",
        f"CPU per pick             {report.cpu_us_per_pick:6.1f} microseconds, {PICKED_ENDPOINTS} endpoints, "
        f"{len(PICKED_WEIGHTS)} scorers, {PICKED_PROMPT_BYTES:,} bytes of prompt",
        f"events per token         {relay.events_per_token:6.3f}",
        f"resident memory          {report.resident_bytes / 2**20:6.0f} MiB",
        f"errors                   {report.errors:6d} of {relay.requests:,} requests",
    ]
    if floor:
        lines.insert(1, f"C floor per send         {1e6 / floor:6.1f} microseconds, in the same run")
    return "\n".join(lines)
