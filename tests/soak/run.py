"""``python -m tests.soak server``: rounds of load and faults, with all counts reconciled after each."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import uvloop

from penstock.bench.deadline import ProgressCallback
from penstock.bench.errors import BenchError
from penstock.bench.machine import this_machine
from penstock.bench.server_process import ServerProcess
from penstock.gateway.routing.prefix_affinity import MAX_INDEXED, prefix_blocks
from penstock.supervisor.startup.model_resolution import DEMO_DIR
from tests.soak.client import ClientPool
from tests.soak.config import SoakConfig, soak_arguments
from tests.soak.fault_injection import FaultInjector
from tests.soak.hostile_client import Attacker, HostileClient
from tests.soak.hostile_http2 import HostileHttp2Client
from tests.soak.http2_client import Http2ClientPool
from tests.soak.leaks import MAX_FILES, Growth, MemorySample, growth, leaks
from tests.soak.oracle import Oracle
from tests.soak.report import SoakReport
from tests.soak.request_mix import RequestMix, RequestSpec
from tests.soak.request_verification import ClientCounts, RequestEnd, RequestVerifier
from tests.soak.server_processes import ProcessInstance, ProcessTree, files_below, is_alive, process_of
from tests.soak.token_accounting import ServerCounts, TokenBalance, read_server_counts, reconcile

Pool = ClientPool | Http2ClientPool
START_S = 120.0
REQUEST_S = 150.0
"""Time limit of a request: the longest takes about 20 s, twice that with a hung engine or a restart."""
SETTLE_S = 120.0
"""Time limit for the server to become complete and idle after a round."""
STEADY_S = 2.2
"""Counts that have not changed for this long are complete: processes report once a second."""
POLL_S = 0.4
CALM_EVERY = 3
"""One in this many rounds has no faults, beginning with the first."""
PROMPT_BYTES = 32 << 10
"""Size of the prompts that fill the gateway's index."""
LOST_S = 3.0
"""Seconds of tokens that the counts of a killed process may lack: it reports once a second, and messages in
flight are lost. With one that hung before, these are the tokens of the whole time."""


def measure(config: SoakConfig, say: ProgressCallback) -> SoakReport:
    """Runs the soak and ends all processes; ``say`` gets a line after every round.

    Raises BenchError when it is impossible. Defects are reported instead.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as directory:
        say("starting penstock serve --engine synthetic")
        server = ServerProcess(soak_arguments(config, directory), START_S)
        with server, _front(config, server) as gateway:
            soak = _Soak(config, server, Path(directory), say, gateway)
            uvloop.run(soak.run())
        return soak.report(server.exit_code)


@contextlib.contextmanager
def _front(config: SoakConfig, server: ServerProcess) -> Iterator[ServerProcess | None]:
    """The gateway in front of the server, if there is to be one."""
    if not config.gateway:
        yield None
        return
    arguments = ["gateway", "--port=0", "--access-log=none", "--endpoints", server.url]
    with ServerProcess(arguments, START_S) as gateway:
        yield gateway


class _Soak:
    """One run."""

    def __init__(
        self,
        config: SoakConfig,
        server: ServerProcess,
        directory: Path,
        say: ProgressCallback,
        gateway: ServerProcess | None,
    ) -> None:
        rng = random.Random(config.seed)
        oracle = Oracle(DEMO_DIR)
        self._config = config
        self._server = server
        self._directory = directory
        self._say = say
        self._processes = ProcessTree(server.pid)
        self._http = httpx.AsyncClient(base_url=server.url, timeout=30.0, trust_env=False)
        self._faults = FaultInjector(
            self._processes,
            port=urlsplit(server.url).port or 80,
            rng=random.Random(rng.random()),
            hang_timeout_s=config.hang_timeout,
            engines_up=self._engines_up,
            find=lambda kind, text: self._verifier.record_defect(kind, text),
        )
        self._gateway: ProcessInstance | None = None
        if gateway is not None:
            [worker] = psutil.Process(gateway.pid).children()
            self._faults.front = worker
            self._gateway = ProcessInstance("gateway", worker.pid, worker.create_time())
        self._verifier = RequestVerifier(oracle, self._faults.was_killed, through_gateway=gateway is not None)
        self._mix = RequestMix(oracle, random.Random(rng.random()))
        url = server.url if gateway is None else gateway.url
        self._url = url
        self._http1 = ClientPool(url, random.Random(rng.random()))
        self._http2 = Http2ClientPool(url, random.Random(rng.random()))
        self._hostile: list[Attacker] = [
            attacker(
                url,
                random.Random(rng.random()),
                self._verifier.record_defect,
                self._verifier.record_hostile,
                self._faults.was_killed,
            )
            for attacker in (HostileClient, HostileHttp2Client)
        ]
        self._samples: dict[ProcessInstance, list[MemorySample]] = defaultdict(list)
        self._balances: list[TokenBalance] = []
        self._files: list[int] = []
        self._began = 0.0
        """time.monotonic() at the start of the first round."""
        self._halved = False
        self._dead: set[ProcessInstance] = set()
        self._reported: set[str] = set()
        """Kinds of defects of which one was printed."""
        self._seen = "no counts"
        """What the server told last while it was to become idle."""
        self._first: ServerCounts
        self._last: tuple[ServerCounts, ClientCounts]

    # -- the run

    async def run(self) -> None:
        """Runs all rounds. Raises BenchError when the server is not complete and idle at the start."""
        async with self._http:
            if self._gateway is not None:
                await self._fill_gateway()
            started = await self._rest()
            if started is None:
                raise BenchError(f"the server is not complete and idle:\n{self._server.output}")
            self._first = started
            self._last = started, self._verifier.counts.copy()
            self._files.append(files_below(self._directory))
            self._began = time.monotonic()
            number = 0
            while (left := self._left_s()) > 0 and await self._whole_round(number, left):
                number += 1

    async def _fill_gateway(self) -> None:
        """Fills the gateway's index of prompt prefixes, so that its growth is no leak. The server refuses the
        prompts, which exceed the context."""
        number = MAX_INDEXED // len(prefix_blocks("", bytes(PROMPT_BYTES))) + 1
        prompts = (str(10**6 + each) * PROMPT_BYTES for each in range(number))
        async with httpx.AsyncClient(base_url=self._url, timeout=REQUEST_S, trust_env=False) as front:
            for prompt in prompts:
                body = {"prompt": prompt[:PROMPT_BYTES], "max_tokens": 1}
                reply = await front.post("/v1/completions", json=body)
                if reply.status_code != 400:
                    raise BenchError(f"a prompt of {PROMPT_BYTES} bytes: {reply.status_code} {reply.text}")

    async def _whole_round(self, number: int, left: float) -> bool:
        """Runs a round and its checks. False when the server does not become idle."""
        config = self._config
        calm = number % CALM_EVERY == 0 or not config.disturb_every
        self._halve()
        await self._round(min(config.round_s, left), None if calm else config.disturb_every)
        found = await self._rest()
        if found is None:
            self._verifier.record_defect(
                "no rest",
                f"round {number + 1}: not complete and idle in {SETTLE_S:g} s; {self._seen}; processes "
                f"{sorted(each.title for each in self._processes.alive())}; {self._server.output}",
            )
            return False
        await self._settle(number, found)
        return True

    def _left_s(self) -> float:
        """Seconds of load that are left."""
        most = self._config.requests
        if most is not None and self._verifier.counts.requests >= most:
            return 0.0
        return self._config.minutes * 60 - (time.monotonic() - self._began)

    def _halve(self) -> None:
        """At half time, selects processes that have no more faults, to measure their growth."""
        if self._halved or self._left_s() > self._config.minutes * 30:
            return
        self._halved = True
        youngest_first = sorted(self._processes.alive(), key=lambda each: -each.created)
        oldest = {each.role: each.title for each in youngest_first}
        self._faults.spared = frozenset(oldest.values())
        self._samples.clear()

    async def _round(self, seconds: float, disturb_every: float | None) -> None:
        end = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as group:
            injecting = None
            if disturb_every is not None:
                injecting = group.create_task(self._faults.run(disturb_every))
            shared = round(self._config.http2_share * self._config.concurrency)
            pools = [self._http2] * shared + [self._http1] * (self._config.concurrency - shared)
            clients = [group.create_task(self._client(pool, end)) for pool in pools]
            clients += [
                group.create_task(self._attack(number, end)) for number in range(self._config.hostile)
            ]
            await asyncio.sleep(seconds)
            if injecting is not None:
                injecting.cancel()
            await asyncio.gather(*clients)

    async def _client(self, pool: Pool, end: float) -> None:
        """One request after the other until ``end``."""
        while asyncio.get_running_loop().time() < end and self._left_s() > 0:
            await self._request(pool, self._mix.draw())

    async def _attack(self, number: int, end: float) -> None:
        """One hostile act after the other until ``end``, over both protocols in turn."""
        while asyncio.get_running_loop().time() < end and self._left_s() > 0:
            await self._hostile[number % len(self._hostile)].once()
            number += 1

    async def _request(self, pool: Pool, spec: RequestSpec) -> None:
        try:
            attempt = await pool.send(spec, REQUEST_S)
            while attempt.stale and not self._faults.was_killed(attempt):
                self._retry()
                attempt = await pool.send(spec, REQUEST_S)
        except (OSError, TimeoutError) as error:
            self._verifier.record_unsent(error)
        else:
            self._verifier.verify(spec, attempt)

    def _retry(self) -> None:
        """Counts a retry after a closed idle connection, a defect unless API servers were replaced."""
        self._verifier.counts.retried += 1
        if not self._faults.retired:
            self._verifier.record_defect("kept connection closed", "no API server was replaced")

    # -- at rest

    async def _engines_up(self) -> int:
        """Number of ready engines; 0 if the API server that was asked has just died."""
        try:
            return int((await read_server_counts(self._http)).engines_up)
        except httpx.HTTPError:
            return 0

    async def _rest(self) -> ServerCounts | None:
        """Waits until the server is complete and idle and all counts are reported; None after SETTLE_S."""
        self._http1.close()
        self._http2.close()
        end = time.monotonic() + SETTLE_S
        steady: ServerCounts | None = None
        since = 0.0
        while time.monotonic() < end:
            await asyncio.sleep(POLL_S)
            try:
                found = await read_server_counts(self._http)
            except httpx.HTTPError as error:
                self._seen = f"no counts: {error!r}"
                continue  # its API server may have been killed
            self._seen = str(found)
            if not self._is_whole(found):
                steady = None
            elif steady is None or steady.counters != found.counters:
                steady, since = found, time.monotonic()
            elif time.monotonic() - since >= STEADY_S:
                return found
        return None

    def _is_whole(self, found: ServerCounts) -> bool:
        config = self._config
        several = config.api_server_count > 1 or config.engines > 1
        processes = config.api_server_count + config.engines + 1 + several
        # That of this request, and of the latest ones at other API servers; a gateway keeps some.
        alone = found.connections <= config.api_server_count or config.gateway
        up = found.engines_up == config.engines
        return up and alone and found.idle and len(self._processes.alive()) == processes

    async def _settle(self, number: int, found: ServerCounts) -> None:
        """After a round: reconciles the counts and samples the memory of every process."""
        before, clients = self._last
        counts = self._verifier.counts.copy()
        dead = self._deaths()
        deaths, hung = len(dead), len(dead & self._faults.hung)
        rate = max(0.0, found.generated - before.generated) / self._config.round_s
        uncertain = rate * (deaths * LOST_S + hung * self._config.hang_timeout)
        balanced, errors = reconcile(before, found, counts.since(clients), deaths=deaths, uncertain=uncertain)
        self._balances.append(balanced)
        for error in errors:
            self._verifier.record_defect("books", f"round {number + 1}: {error}")
        self._last = found, counts
        await self._sample()
        requests, defects = counts.requests, sum(self._verifier.defects.values())
        for kind in self._verifier.defects.keys() - self._reported:
            self._reported.add(kind)
            self._say(f"{kind}: {self._verifier.findings[kind][0]}")
        self._say(
            f"round {number + 1}: {time.monotonic() - self._began:,.0f} s, {requests:,} requests, "
            f"{balanced.generated:,.0f} tokens, {balanced.unaccounted:+,.0f} unaccounted for, "
            f"{deaths} deaths, {defects} defects"
        )

    def _deaths(self) -> set[ProcessInstance]:
        """The processes with counts that died since the last call. Those not killed are defects."""
        if self._gateway is not None and not is_alive(self._gateway):
            self._verifier.record_defect("death", "the gateway died by itself")
        dead = {each for each in self._processes.seen if not is_alive(each)} - self._dead
        self._dead |= dead
        dead -= self._faults.retired - self._faults.killed
        for each in dead - self._faults.killed:
            self._verifier.record_defect("death", f"{each.title} (process {each.pid}) died by itself")
        return {each for each in dead if each.role != "coordinator"}

    async def _sample(self) -> None:
        objects = await self._tracked_objects()
        requests = self._verifier.counts.requests
        now = time.monotonic() - self._began
        for each in [*self._processes.alive(), *([self._gateway] if self._gateway else [])]:
            process = process_of(each)
            if process is not None:
                resident, descriptors = process.memory_info().rss, process.num_fds()
                sample = MemorySample(now, requests, resident, descriptors, objects=objects.get(each.title))
                self._samples[each].append(sample)
        self._files.append(files_below(self._directory))

    async def _tracked_objects(self) -> dict[str, int]:
        """By process title: engines, and the API servers that respond."""
        found: dict[str, int] = {}
        for _ in range(4 * self._config.api_server_count):
            with contextlib.suppress(httpx.HTTPError):
                reply = await self._http.get("/debug/gc", headers={"connection": "close"})
                processes = reply.raise_for_status().json()["processes"]
                found |= {name: each["tracked"] for name, each in processes.items()}
        return found

    # -- the end

    def report(self, exit_code: int | None) -> SoakReport:
        """Builds the report once the server has exited with ``exit_code``."""
        verifier, faults = self._verifier, self._faults
        if exit_code != 0:
            verifier.record_defect("end", f"the server ended with {exit_code}: {self._server.output}")
        for each in self._processes.left_over():
            verifier.record_defect("end", f"{each.title} (process {each.pid}) outlived the server")
        grown = self._growth()
        for leak in leaks(grown, self._config.most_mib_per_hour, self._config.most_objects):
            verifier.record_defect("leak", leak)
        if self._files[-1] > self._files[0] + MAX_FILES:
            verifier.record_defect(
                "leak", f"{self._files[0]} files in the run directory have become {self._files[-1]}"
            )
        found, counts = self._last
        uncertain = sum(each.uncertain for each in self._balances)
        deaths = sum(each.deaths for each in self._balances)
        whole, errors = reconcile(self._first, found, counts, deaths=deaths, uncertain=uncertain)
        for error in errors:
            verifier.record_defect("books", f"whole run: {error}")
        return SoakReport(
            passed=not verifier.defects,
            defects=dict(verifier.defects),
            findings=verifier.findings,
            wall_s=time.monotonic() - self._began,
            requests=verifier.counts.requests,
            ends={str(end): verifier.counts.ends[end] for end in RequestEnd if verifier.counts.ends[end]},
            retried=verifier.counts.retried,
            streams=verifier.counts.streams,
            disturbances=dict(faults.done),
            deaths=deaths,
            resumed=round(found.resumed - self._first.resumed),
            tokens=whole,
            calm=[each for each in self._balances if not each.deaths],
            growth=grown,
            run_directory_files=[self._files[0], self._files[-1]],
            options=_options(self._config),
            machine=this_machine(),
        )

    def _growth(self) -> list[Growth]:
        return [
            growth(each.title, each.pid, samples)
            for each, samples in sorted(self._samples.items())
            if len(samples) > 1
        ]


def _options(config: SoakConfig) -> dict[str, object]:
    """The options that are set, without --json."""
    values = vars(config)
    return {name: value for name, value in values.items() if value is not None and name != "json"}
