"""``penstock bench gateway``: CPU time per relayed event and per choice of an endpoint."""

from __future__ import annotations

import contextlib
import random
import shlex
import statistics
import time
from collections import deque

import msgspec

from penstock.bench.comparison import ComparisonReport, build, run_by_turns, side
from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.host_benchmark import NOT_SHOWN, measure
from penstock.bench.process_usage import pids_of_gateway
from penstock.bench.report import HostReport
from penstock.bench.server_process import ServerProcess, serve_arguments
from penstock.bench.server_under_load import MeasuredServer, ServerUnderLoad
from penstock.config.bench import BenchGatewayConfig, BenchHostConfig

PICKED_ENDPOINTS = (64, 1000)
"""Numbers of endpoints of which one is chosen."""
PICKED_MODELS = 64
PICKED_WEIGHTS = {"queue": 2.0, "running": 1.0, "kv": 1.0, "prefix": 2.0}
PICKED_PROMPT_BYTES = 8000
"""About 2,000 tokens."""
PICKS = 2000
PICK_RUNS = 5


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results. ``relay`` has all figures of the load; in it, the API server is the gateway."""

    cpu_us_per_event: float
    """CPU time of the gateway's processes per relayed event, including the requests."""
    cpu_us_per_pick: dict[int, float]
    """CPU time to choose one of so many endpoints, with four scorers, for a prompt of 8,000 bytes for one of
    64 models that all of them have; the begin and the end of a request at the endpoint included."""
    resident_bytes: int
    errors: int
    relay: HostReport


def measure_gateway(config: BenchGatewayConfig, say: ProgressCallback) -> GatewayReport:
    """Run the measurement and end all its processes. Raises BenchError."""
    deadline = Deadline(config.timeout)
    with contextlib.ExitStack() as stack:
        gateway = _Gateways(stack, deadline, say).start(config)
        relay = measure(load_of(config, gateway, deadline.left("the load")), say)
    events = relay.events_per_request * relay.requests
    return GatewayReport(
        cpu_us_per_event=relay.api_server_cpu_s.total / events * 1e6 if events else 0.0,
        cpu_us_per_pick={count: pick_cost_us(count) for count in PICKED_ENDPOINTS},
        resident_bytes=relay.subject.api_server_resident_bytes,
        errors=relay.errors,
        relay=relay,
    )


def compare_gateways(
    config: BenchGatewayConfig, other: BenchGatewayConfig, say: ProgressCallback
) -> ComparisonReport:
    """Measure two gateways by turns, in front of the same servers if these have the same options.

    Raises BenchError.
    """
    deadline = Deadline(config.timeout)
    with contextlib.ExitStack() as stack:
        gateways = _Gateways(stack, deadline, say)
        sides = []
        for each in (config, other):
            gateway = gateways.start(each)
            server = MeasuredServer(gateway.url, pids_of_gateway(gateway.pid))
            load = load_of(each, gateway, deadline.left("the load"))
            sides.append(ServerUnderLoad(load, server, stack, deadline))
        first, second = run_by_turns(sides[0], sides[1], deadline, say)
    return build(
        config.compare_with or "",
        side(sides[0].config, _options_shown(config), first),
        side(sides[1].config, _options_shown(other), second),
    )


class _Gateways:
    """Starts gateways, and model servers for them, which those of the same options share."""

    def __init__(self, stack: contextlib.ExitStack, deadline: Deadline, say: ProgressCallback) -> None:
        self._stack = stack
        self._deadline = deadline
        self._say = say
        self._servers: dict[tuple[str, ...], list[str]] = {}

    def start(self, config: BenchGatewayConfig) -> ServerProcess:
        urls = self._model_servers(config)
        self._say("starting penstock gateway")
        arguments = ["gateway", "--port=0", *shlex.split(config.gateway_args or ""), "--endpoints", *urls]
        started = ServerProcess(arguments, self._deadline.left("the start of the gateway"))
        return self._stack.enter_context(started)

    def _model_servers(self, config: BenchGatewayConfig) -> list[str]:
        server = BenchHostConfig(step_ms=config.step_ms, concurrency=config.streams, streams=config.streams)
        arguments = serve_arguments(server)
        urls = self._servers.setdefault(tuple(arguments), [])
        while len(urls) < config.servers:
            self._say(f"starting model server {len(urls) + 1} of {config.servers}")
            started = ServerProcess(arguments, self._deadline.left("the start of a model server"))
            urls.append(self._stack.enter_context(started).url)
        return urls


def load_of(config: BenchGatewayConfig, gateway: ServerProcess, seconds: float) -> BenchHostConfig:
    """The load for one gateway."""
    return BenchHostConfig(
        streams=config.streams,
        http2=config.http2,
        connections=config.connections,
        tokens=config.tokens,
        endpoint=config.endpoint,
        rounds=config.rounds,
        url=gateway.url,
        pid=[gateway.pid],
        timeout=seconds,
    )


def _options_shown(config: BenchGatewayConfig) -> dict[str, object]:
    values = vars(config)
    return {name: value for name, value in values.items() if value is not None and name not in NOT_SHOWN}


def pick_cost_us(count: int, picks: int = PICKS, runs: int = PICK_RUNS) -> float:
    """CPU microseconds per choice of ``count`` endpoints, including the hash of the prompt: the median of
    ``runs`` runs."""
    from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
    from penstock.gateway.routing.pick_request import PickRequest
    from penstock.gateway.routing.picker import Picker
    from penstock.gateway.routing.prefix_affinity import prefix_blocks

    rng = random.Random(0)
    endpoints = [Endpoint(f"http://10.0.{number >> 8}.{number & 255}:8000") for number in range(count)]
    for endpoint in endpoints:
        endpoint.scrape_succeeded(EndpointLoad(rng.randrange(5), rng.randrange(100), rng.random()), 0.0)
    models = [(f"model-{number}", list(endpoints)) for number in range(PICKED_MODELS)]
    prompts = [rng.randbytes(PICKED_PROMPT_BYTES) for _ in range(200)]
    picker = Picker(PICKED_WEIGHTS, rng=rng)
    running: deque[Endpoint] = deque()
    costs = []
    for _ in range(runs):
        began = time.process_time()
        for number in range(picks):
            model, candidates = models[number % PICKED_MODELS]
            blocks = prefix_blocks(model, prompts[number % len(prompts)])
            endpoint = picker.pick(PickRequest(model, blocks=blocks), candidates, 1.0)
            endpoint.request_sent(2000, 1.0)
            running.append(endpoint)
            if len(running) > 8 * count:
                running.popleft().request_ended(2000)
        costs.append((time.process_time() - began) / picks * 1e6)
    return statistics.median(costs)


def render(report: GatewayReport) -> str:
    """The report as a table."""
    relay = report.relay
    floor = relay.floor_sends_per_cpu_s
    lines = [
        f"clients: {relay.subject.protocol}",
        f"CPU per relayed event    {report.cpu_us_per_event:6.1f} microseconds, requests included",
        *(
            f"CPU per pick             {cost:6.1f} microseconds, {count:,} endpoints, "
            f"{PICKED_MODELS} models, {len(PICKED_WEIGHTS)} scorers, {PICKED_PROMPT_BYTES:,} bytes of prompt"
            for count, cost in report.cpu_us_per_pick.items()
        ),
        f"events per token         {relay.events_per_token:6.3f}",
        f"resident memory          {report.resident_bytes / 2**20:6.0f} MiB",
        f"errors                   {report.errors:6d} of {relay.requests:,} requests",
    ]
    if floor:
        lines.insert(2, f"C floor per send         {1e6 / floor:6.1f} microseconds, in the same run")
    return "\n".join(lines)
