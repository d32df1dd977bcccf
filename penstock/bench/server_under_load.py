"""A measured server and its load client."""

from __future__ import annotations

import contextlib
import ssl
import tempfile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec

from penstock.bench.clock.processes import ClockEngines
from penstock.bench.deadline import Deadline
from penstock.bench.errors import BenchError
from penstock.bench.load.certificate import make_certificate
from penstock.bench.load.messages import LoadPlan, RoundResult
from penstock.bench.load.process import LoadProcess
from penstock.bench.process_usage import CpuTime, ServerPids, cpu_time, pids_of_front_end, pids_of_supervisor
from penstock.bench.request_bodies import BenchmarkBodies, ProbeResult
from penstock.bench.server_process import ServerProcess, serve_arguments
from penstock.config.bench import BenchHostConfig

DEFAULT_PORT = 80


class MeasuredRound(msgspec.Struct, frozen=True):
    """One round: the load client's results, and the CPU time of the server's processes.

    ``tokens`` are those of successful requests.
    """

    load: RoundResult
    api_server_cpu_s: CpuTime
    engine_cpu_s: CpuTime
    tokens: int
    tokens_per_cpu_s: float


class MeasuredServer(NamedTuple):
    """A running server. ``authority``: file with the certificate that its TLS is verified with, if any;
    ``pid``: the process that was started; ``behind``: URL of the server behind a gateway, which is asked for
    the model and the length of prompts, as gateways need not relay that."""

    url: str
    processes: ServerPids
    pid: int | None = None
    authority: str | None = None
    behind: str | None = None


class PreparedLoad(NamedTuple):
    """What the first request showed, the plan, and the request body of slow readers, if there are any."""

    facts: ProbeResult
    plan: LoadPlan
    endless: str


def start_server(
    config: BenchHostConfig, api_servers: int, stack: contextlib.ExitStack, deadline: Deadline
) -> MeasuredServer:
    """Start ``penstock serve --engine synthetic`` for the measurement; the stack ends it."""
    arguments, authority = serve_arguments(config, api_servers), None
    if config.tls:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-tls-"))
        authority, certificate = make_certificate(Path(directory))
        arguments.append(f"--ssl-certfile={certificate}")
    engines = stack.enter_context(ClockEngines(config)) if config.attach else None
    on_line = (lambda line: None) if engines is None else engines.on_line
    left = deadline.left("the start of the server")
    server = stack.enter_context(ServerProcess(arguments, left, on_line=on_line))
    processes = pids_of_supervisor(server.pid)
    if len(processes.api_servers) != api_servers:
        raise BenchError(f"the server does not have {api_servers} processes titled penstock: api-server")
    if config.attach:
        processes = pids_of_front_end(server.pid)
    return MeasuredServer(server.url, processes, server.pid, authority)


def prepare(config: BenchHostConfig, server: MeasuredServer, deadline: Deadline) -> PreparedLoad:
    """Send one request and plan the load."""
    headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    parts = urlsplit(server.url)
    with httpx.Client(
        base_url=server.behind or server.url,
        headers=headers,
        timeout=deadline.left("the first request"),
        trust_env=False,
        verify=ssl.create_default_context(cafile=server.authority),
    ) as http:
        requests = BenchmarkBodies(config, http)
        facts = requests.probe()
        plan = LoadPlan(
            host=parts.hostname or "",
            port=parts.port or DEFAULT_PORT,
            path=parts.path + requests.path,
            bodies=requests.bodies(),
            connections=config.load_connections,
            in_flight=config.in_flight,
            requests=config.requests_per_round,
            api_key=config.api_key,
            http2=config.http2,
            streams_per_connection=-(-config.measured_streams // config.load_connections),
            authority=server.authority,
        )
        endless = requests.slow_reader_body() if config.slow_readers else ""
    return PreparedLoad(facts, plan, endless)


class ServerUnderLoad:
    """A server whose load client is connected, until the stack closes."""

    def __init__(
        self,
        config: BenchHostConfig,
        server: MeasuredServer,
        stack: contextlib.ExitStack,
        deadline: Deadline,
    ) -> None:
        self.config = config
        self.processes = server.processes
        self.prepared = prepare(config, server, deadline)
        parent = [server.pid] if server.pid is not None else []
        before = cpu_time(parent)
        self._load = stack.enter_context(LoadProcess(self.prepared.plan, deadline.left("the connections")))
        self.accepting = cpu_time(parent) - before
        """CPU time of the server's first process while the client connected."""

    def run(self, seconds: float, *, keep: bool = True) -> MeasuredRound:
        """One round. ``keep``: its latencies count in the totals of later results."""
        processes = self.processes
        engines, api_servers = cpu_time(processes.engines), cpu_time(processes.api_servers)
        result = self._load.run(keep=keep, seconds=seconds)
        api_servers = cpu_time(processes.api_servers) - api_servers
        engines = cpu_time(processes.engines) - engines
        tokens = (result.requests - result.errors) * self.config.tokens
        per_cpu_s = tokens / api_servers.total if api_servers.total else 0.0
        return MeasuredRound(result, api_servers, engines, tokens, per_cpu_s)
