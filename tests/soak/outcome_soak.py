"""``python -m tests.soak outcomes``: model servers fail behind a gateway, in every way, at random.

Every request ends for its client as the gateway says, none takes longer than the gateway's time-outs allow,
and no healthy server is out for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from io import TextIOWrapper
from pathlib import Path

import httpx
import msgspec
import uvloop

from penstock.bench.deadline import ProgressCallback
from penstock.bench.errors import BenchError
from penstock.bench.machine import Machine, this_machine
from penstock.bench.server_process import ServerProcess
from tests.soak.config import OutcomeSoakConfig
from tests.soak.faulty_server import BEHAVIOURS, GOOD
from tests.soak.outcome_client import OutcomeClient, View

START_S = 60.0
FIRST_TOKEN_S, EVENT_S, TOTAL_S = 3.0, 3.0, 12.0
"""Time-outs of the gateway."""
SLACK_S = 3.0
"""What a request may take longer: checks four times a second, a busy machine."""
FAULT_S = (1.0, 8.0)
"""Duration of a fault."""
WATCH_S = 0.25
LOG_WAIT_S = 15.0
"""Time after the end of a request within which its line is in the access log."""
REPORT_EVERY_S = 60.0
MAX_FINDINGS = 20
PROCESS_FAULTS = ("killed", "hung")
_UP = re.compile(r'^penstock_gateway_endpoint_up\{.*endpoint="([^"]+)".*\} (\S+)$', re.M)


class OutcomeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results."""

    requests: int
    seen: dict[str, int]
    """Requests by how they ended for their clients."""
    outcomes: dict[str, int]
    """Requests by outcome and status, as the gateway says."""
    faults: dict[str, int]
    longest_s: float
    """Longest request, and longest time for which a healthy server was out."""
    longest_out_s: float
    attempts: int
    defects: dict[str, int]
    findings: dict[str, list[str]]
    wall_s: float
    machine: Machine


class FaultyServer:
    """One model server: a process, which is started again on its port when it was killed."""

    def __init__(self) -> None:
        self.port = 0
        self.healthy_since: float | None = None
        """time.monotonic(); None: it has a fault."""
        self.latest_fault = ""
        self._process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Also again, on the same port."""
        await asyncio.to_thread(self._start)
        self.healthy_since = time.monotonic()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.faulty_server", str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    async def suffer(self, fault: str, seconds: float) -> None:
        """Has ``fault`` for so long."""
        self.healthy_since, self.latest_fault = None, f"{fault} for {seconds:.1f} s"
        match fault:
            case "killed":
                self.close()
                await asyncio.sleep(seconds)
                await self.start()
            case "hung":
                self._process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                self._process.send_signal(signal.SIGCONT)
            case _:
                self._behave(fault)
                await asyncio.sleep(seconds)
                self._behave(GOOD)
        self.healthy_since = time.monotonic()

    def _behave(self, name: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class _Soak:
    def __init__(
        self, config: OutcomeSoakConfig, servers: list[FaultyServer], gateway: ServerProcess, log: Path
    ) -> None:
        self._config = config
        self._servers = servers
        self._gateway = gateway
        self._rng = random.Random(config.seed)
        self._log = log
        self._views: dict[str, View] = {}
        """Of requests that the access log has not told of yet."""
        self._lines: dict[str, tuple[str, int]] = {}
        """Outcome and status of requests that have not ended for their client yet."""
        self._partial_line = ""
        self._end = time.monotonic() + config.minutes * 60
        self._up_at: dict[str, float] = {}
        """When each endpoint was last up."""
        self.seen: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.defects: Counter[str] = Counter()
        self.findings: dict[str, list[str]] = {}
        self.attempts = 0
        self.longest_s = self.longest_out_s = 0.0

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def find(self, kind: str, text: str) -> None:
        """Record a defect."""
        self.defects[kind] += 1
        samples = self.findings.setdefault(kind, [])
        if len(samples) < MAX_FINDINGS:
            samples.append(text)

    async def run(self, say: ProgressCallback) -> None:
        with self._log.open() as log:
            async with asyncio.TaskGroup() as group:
                clients = [
                    group.create_task(self._client(f"c{number}-{self._config.seed}"))
                    for number in range(self._config.clients)
                ]
                others = [
                    group.create_task(self._disturb()),
                    group.create_task(self._watch()),
                    group.create_task(self._read_log(log)),
                    group.create_task(self._tell(say)),
                ]
                await asyncio.wait(clients)
                for other in others:
                    other.cancel()
            await asyncio.sleep(2 * WATCH_S)
            self._read_lines(log)
        for view in self._views.values():
            self.find("no line", f"{view.id}: the gateway says nothing of it; the client saw {view.seen}")
        for id, (outcome, _) in self._lines.items():
            self.find("no request", f"{id}: the gateway says {outcome}, no client sent it")

    # -- load

    async def _client(self, name: str) -> None:
        client = OutcomeClient(self._gateway.url, name, random.Random(self._rng.random()))
        while not self.over:
            view = await client.once()
            self.seen[view.seen] += 1
            self.longest_s = max(self.longest_s, view.took)
            if view.took > TOTAL_S + SLACK_S:
                self.find("late", f"{view.id}: {view.took:.1f} s, {view.seen} {view.status}")
            if view.longest_gap > max(EVENT_S, FIRST_TOKEN_S) + SLACK_S:
                self.find("silent", f"{view.id}: nothing for {view.longest_gap:.1f} s, {view.seen}")
            self._views[view.id] = view
            self._compare(view.id)
        client.close()

    async def _disturb(self) -> None:
        """One fault after the other, several at a time, but never of all servers."""
        kinds = [*PROCESS_FAULTS, *(name for name in BEHAVIOURS if name != GOOD)]
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._rng.expovariate(1 / self._config.disturb_every))
                healthy = [each for each in self._servers if each.healthy_since is not None]
                if len(healthy) > 1:
                    fault = self._rng.choice(kinds)
                    self.faults[fault] += 1
                    server = self._rng.choice(healthy)
                    server.healthy_since = None
                    group.create_task(server.suffer(fault, self._rng.uniform(*FAULT_S)))

    # -- checks

    async def _watch(self) -> None:
        """How long healthy servers are out."""
        async with httpx.AsyncClient(base_url=self._gateway.url, timeout=30.0, trust_env=False) as http:
            while True:
                await asyncio.sleep(WATCH_S)
                page = (await http.get("/metrics")).text
                now = time.monotonic()
                ups = {url for url, value in _UP.findall(page) if float(value)}
                for server in self._servers:
                    since = server.healthy_since
                    if since is None or server.url in ups:
                        self._up_at[server.url] = now
                        continue
                    out = now - max(since, self._up_at.get(server.url, since))
                    self.longest_out_s = max(self.longest_out_s, out)
                    if out > self._config.most_out_s:
                        self.find(
                            "out",
                            f"{server.url} ({server.latest_fault}) has been healthy for {now - since:.1f} s, "
                            f"and is out for {out:.1f} s",
                        )
                        self._up_at[server.url] = now  # one finding for each such time

    async def _read_log(self, log: TextIOWrapper) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._read_lines(log)
            late = time.monotonic() - LOG_WAIT_S
            for view in [each for each in self._views.values() if each.began + each.took < late]:
                del self._views[view.id]
                self.find("no line", f"{view.id}: the gateway says nothing of it; the client saw {view.seen}")

    def _read_lines(self, log: TextIOWrapper) -> None:
        while text := log.readline():
            self._partial_line += text  # a line may be seen while it is written
            if not text.endswith("\n"):
                return
            line, self._partial_line = self._partial_line, ""
            fields = json.loads(line)
            outcome, status = fields["outcome"], fields["status"]
            self.outcomes[f"{outcome} {status}"] += 1
            self.attempts += fields["attempts"]
            if fields["request_id"] in self._lines:
                self.find("counted twice", line.strip())
            self._lines[fields["request_id"]] = outcome, status
            self._compare(fields["request_id"], line.strip())

    def _compare(self, id: str, line: str = "") -> None:
        if id not in self._views or id not in self._lines:
            return
        view, (outcome, status) = self._views.pop(id), self._lines.pop(id)
        if problem := view.disagrees(outcome, status):
            self.find("disagreement", f"{problem} {line}".strip())

    async def _tell(self, say: ProgressCallback) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            say(
                f"{time.monotonic() - began:,.0f} s, {sum(self.seen.values()):,} requests, "
                f"{sum(self.faults.values())} faults, longest {self.longest_s:.1f} s, "
                f"out {self.longest_out_s:.1f} s, {sum(self.defects.values())} defects"
            )


def measure(config: OutcomeSoakConfig, say: ProgressCallback) -> OutcomeReport:
    """Runs the soak and ends all processes. Raises BenchError when it is impossible; defects are reported."""
    report: OutcomeReport = uvloop.run(_measure(config, say))
    return report


async def _measure(config: OutcomeSoakConfig, say: ProgressCallback) -> OutcomeReport:
    began = time.monotonic()
    servers = [FaultyServer() for _ in range(config.servers)]
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as directory, contextlib.ExitStack() as stack:
        log = Path(directory) / "access.jsonl"
        for server in servers:
            await server.start()
            stack.callback(server.close)
        arguments = [
            "gateway",
            "--port=0",
            "--access-log=all",
            f"--access-log-file={log}",
            "--connect-timeout=1",
            f"--first-token-timeout={FIRST_TOKEN_S}",
            f"--event-timeout={EVENT_S}",
            f"--request-timeout={TOTAL_S}",
            "--endpoints",
            *(server.url for server in servers),
        ]
        say("starting penstock gateway")
        gateway = await asyncio.to_thread(ServerProcess, arguments, START_S)
        stack.enter_context(gateway)
        soak = _Soak(config, servers, gateway, log)
        await soak.run(say)
        if gateway.exit_code is not None:
            soak.find("end", f"the gateway has ended with {gateway.exit_code}: {gateway.output}")
    if not soak.outcomes:
        raise BenchError(f"the gateway has answered nothing:\n{gateway.output}")
    return OutcomeReport(
        requests=sum(soak.seen.values()),
        seen=dict(soak.seen),
        outcomes=dict(soak.outcomes),
        faults=dict(soak.faults),
        longest_s=soak.longest_s,
        longest_out_s=soak.longest_out_s,
        attempts=soak.attempts,
        defects=dict(soak.defects),
        findings=soak.findings,
        wall_s=time.monotonic() - began,
        machine=this_machine(),
    )


def render(report: OutcomeReport) -> str:
    """The report as text."""
    lines = [str(report.machine), f"{report.requests:,} requests in {report.wall_s:,.0f} s"]
    for title, counts in (("seen", report.seen), ("gateway", report.outcomes), ("faults", report.faults)):
        lines += [f"{title:8s} {name:30s} {count:9,d}" for name, count in sorted(counts.items())]
    lines.append(
        f"longest request {report.longest_s:.1f} s; a healthy server was out for {report.longest_out_s:.1f} s"
    )
    for kind, samples in report.findings.items():
        lines += [f"{kind}: {report.defects[kind]:,} times", *(f"  {sample}" for sample in samples)]
    return "\n".join([*lines, "CHECKS FAILED" if report.defects else "all checks passed"])
