"""``python -m tests.soak weights``: updates of weights through a gateway, under streams and kills.

The synthetic engine's tokens tell by which weights they were made, so the version of every token is checked.
A server with several API servers and engines stands behind a gateway with two workers. An engine, an API
server and a worker of the gateway are killed meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil

from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.errors import BenchError
from tests.gateway.processes import Gateway, gateway
from tests.integration.server import SYNTHETIC, Server
from tests.integration.weight_marks import MARKS, ORDINARY, TOLD, WeightFiles
from tests.soak.config import WeightUpdatesConfig

STEP_MS = "60"
ATTEMPTS = 50
"""Calls for one update: others end with a gateway's worker, or are rolled back with an API server."""
PAUSE_S = 0.2
MOST_DEFECTS = 20
"""Defects that are kept in words."""


class WeightUpdatesReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results."""

    updates: int
    calls: dict[str, int]
    """Replies of the gateway to the calls, by status and outcome."""
    median_call_s: float
    longest_call_s: float
    killed: list[str]
    ends: dict[str, int]
    """How streams ended."""
    checked_tokens: int
    most_versions: int
    """Of one stream."""
    defects: list[str]


class _Clients:
    """Streams one after the other, and what they say of the weights."""

    def __init__(self, url: str, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self.defects: list[str] = []
        self.marks: dict[str, int] = {}
        """What the tokens of each version tell."""
        self.checked = self.most_versions = 0
        self.over = False
        self._url, self._seed = url, seed

    def note(self, defect: str) -> None:
        if len(self.defects) < MOST_DEFECTS:
            self.defects.append(defect)

    async def run(self, count: int) -> None:
        limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
        connections = httpx.AsyncClient(base_url=self._url, timeout=120, limits=limits)
        async with connections as client, asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(self._one(client, random.Random(self._seed + number)))

    async def _one(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while not self.over:
            body = TOLD | {
                "prompt": "x",
                "stream": True,
                "ignore_eos": True,
                "max_tokens": rng.choice((20, 60, 120)),
                "stream_interval": rng.choice((1, 5, 10)),
                "seed": rng.randrange(1 << 30),
            }
            if rng.random() < 0.25:
                body["logprobs"] = 1
            try:
                end = await self._stream(client, body)
            except httpx.TimeoutException:
                end = "timeout"
                self.note("a stream without an end")
            except httpx.HTTPError as error:  # the worker of the gateway is gone
                end = f"connection: {type(error).__name__}"
            self.ends[end] += 1
            if not end.startswith("finish"):
                await asyncio.sleep(PAUSE_S)

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        """How it ended."""
        tokens: list[int] = []
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                error = msgspec.json.decode(await reply.aread())["error"]
                return f"{reply.status_code} {error['code']}"
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    return f"error {event['error']['code']}"
                [choice] = event["choices"]
                tokens += choice.get("token_ids") or []
                if choice["finish_reason"]:
                    self._check(tokens, choice["weight_versions"], body["max_tokens"])
                    return f"finish {choice['finish_reason']}"
        self.note("a body that ended without an end of its stream")
        return "nothing"

    def _check(self, tokens: list[int], spans: list[dict[str, Any]], wanted: int) -> None:
        bounds = [0, *(span["end"] for span in spans)]
        if len(tokens) != wanted or bounds[-1] != wanted or bounds[:-1] != [each["start"] for each in spans]:
            self.note(f"{len(tokens)} tokens of {wanted}, with the spans {spans}")
            return
        marks = (np.searchsorted(ORDINARY, tokens) % MARKS).tolist()
        for span in spans:
            told, version = set(marks[span["start"] : span["end"]]), span["version"]
            if told != {self.marks[version]}:
                self.note(f"tokens of version {version} tell {told}, not {self.marks[version]}")
        self.checked += len(tokens)
        self.most_versions = max(self.most_versions, len(spans))


class _Updates:
    """Updates, each called until it is done."""

    def __init__(self, url: str, clients: _Clients) -> None:
        self.calls: Counter[str] = Counter()
        self.seconds: list[float] = []
        self._url, self._clients = url, clients
        self._generation = 0

    async def make(self, number: int, path: str) -> None:
        version = f"v{number}"
        self._clients.marks[version] = number % MARKS
        key = f"{version}-0"
        for attempt in range(1, ATTEMPTS):
            began = time.monotonic()
            try:
                async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
                    body = {"path": path, "weight_version": version, "cache": "keep"}
                    headers = {"idempotency-key": key}
                    reply = await client.post("/update_weights?timeout=60", json=body, headers=headers)
            except httpx.HTTPError as error:  # the same key again: it may have run
                self.calls[f"connection: {type(error).__name__}"] += 1
            else:
                found = reply.json()
                self.calls[f"{reply.status_code} {found.get('outcome')}"] += 1
                if reply.status_code == 200:
                    self.seconds.append(time.monotonic() - began)
                    self._check(version, found)
                    return
                key = f"{version}-{attempt}"
            await asyncio.sleep(PAUSE_S)
        raise BenchError(f"{version} was not done by {ATTEMPTS} calls: {dict(self.calls)}")

    def _check(self, version: str, reply: dict[str, Any]) -> None:
        engines = reply["endpoints"][0]["engines"]
        found = [(engine["result"]["version"], engine["result"]["generation"]) for engine in engines]
        if len(set(found)) != 1 or found[0][0] != version or found[0][1] <= self._generation:
            self._clients.note(f"{version} after generation {self._generation}: engines have {found}")
        self._generation = max(generation for _, generation in found)


def _kill(what: str, server: Server, front: Gateway, rng: random.Random) -> str:
    processes: list[psutil.Process] = list(front.workers if what == "worker" else server.children(what))
    process = rng.choice(processes)
    process.kill()
    return f"{what} {process.pid}"


def measure(config: WeightUpdatesConfig, say: ProgressCallback) -> WeightUpdatesReport:
    """Runs the load and ends all processes. Raises BenchError."""
    deadline = Deadline(config.timeout)
    fleet = (
        *(*SYNTHETIC, "--synthetic-step-ms", STEP_MS, "--max-num-seqs", str(config.streams)),
        *("--api-server-count", str(config.api_server_count), "--data-parallel-size", str(config.engines)),
    )
    options = ("--workers", "2", "--allow-loopback-admin", "--scrape-interval", "0.2", "--access-log", "none")
    with (
        tempfile.TemporaryDirectory() as directory,
        Server(*fleet, directory=Path(directory)) as server,
        gateway(server.url, options=options) as front,
    ):
        left = deadline.left("the load")
        load = _measure(config, server, front, Path(directory), say)
        try:
            return asyncio.run(asyncio.wait_for(load, left))
        except TimeoutError:
            raise BenchError(f"--timeout: {config.timeout:g} s are over before the last update") from None


async def _measure(
    config: WeightUpdatesConfig, server: Server, front: Gateway, directory: Path, say: ProgressCallback
) -> WeightUpdatesReport:
    files, rng = WeightFiles(directory), random.Random(config.seed)
    clients = _Clients(front.url, config.seed)
    updates = _Updates(front.url, clients)
    at = [config.updates * part // 5 for part in range(1, 5)]
    kills = dict(zip(at, ("engine", "api-server", "worker", "engine"), strict=True))
    killed: list[str] = []
    await updates.make(1, files.make(1))
    load = asyncio.create_task(clients.run(config.streams))
    try:
        for number in range(2, config.updates + 1):
            update = asyncio.create_task(updates.make(number, files.make(number % MARKS)))
            if number in kills:
                await asyncio.sleep(rng.random() / 20)
                killed.append(await asyncio.to_thread(_kill, kills[number], server, front, rng))
                say(f"killed {killed[-1]} in update {number}")
            await update
            await asyncio.sleep(config.pause_s)
    finally:
        clients.over = True
        await load
    engines = server.get("/weight_version").json()["engines"]
    if {each["weight_version"] for each in engines} != {f"v{config.updates}"}:
        clients.note(f"in the end engines have {engines}")
    if not server.get("/weights_checksum").json()["equal"]:
        clients.note("in the end the engines' weights differ")
    return WeightUpdatesReport(
        updates=config.updates,
        calls=dict(updates.calls),
        median_call_s=statistics.median(updates.seconds),
        longest_call_s=max(updates.seconds),
        killed=killed,
        ends=dict(clients.ends),
        checked_tokens=clients.checked,
        most_versions=clients.most_versions,
        defects=clients.defects,
    )


def render(report: WeightUpdatesReport) -> str:
    """The report in words."""
    lines = [
        f"{report.updates} updates; calls: {report.calls}",
        f"time of a call: median {report.median_call_s:.3f} s, longest {report.longest_call_s:.3f} s",
        f"killed: {', '.join(report.killed)}",
        f"streams ended: {report.ends}",
        f"checked tokens: {report.checked_tokens}, versions in one stream: up to {report.most_versions}",
        *(f"DEFECT: {defect}" for defect in report.defects),
    ]
    return "\n".join(lines)
