"""``penstock bench images``: what pictures cost, whom they delay, what deaths of processes leave behind."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
import psutil

from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.errors import BenchError
from penstock.bench.images.picture_load import DIED, PictureLoad
from penstock.bench.images.pictures import Png, jpeg_url, picture_body, text_body
from penstock.bench.machine import Machine, this_machine
from penstock.bench.process_usage import alive, cpu_time, title
from penstock.bench.server_under_load import MeasuredServer, ServerUnderLoad, start_server
from penstock.config.bench import BenchHostConfig, BenchImagesConfig

POSTERS = 8
"""Requests with pictures at a time: more than two media workers take."""
JPEG_MEGAPIXELS = 20.0
STREAM_TOKENS = 200
"""Events of a stream in a round, one per step."""
STEP_MS = 20.0
ROLES = ("media-worker", "api-server", "engine")
MAX_BODY = 128 << 20
KILLS_PER_SERVER = 24
"""The next server takes over then, as processes that die often restart late."""
KILL_INTERVAL_S = 0.5
DECODED = 'penstock:media_images_total{outcome="decoded"'
ENCODED = "penstock:encoder_images_total{"
WORD = "word "


class Repeated(msgspec.Struct, frozen=True, kw_only=True):
    """One picture, sent many times."""

    sent: int
    body_bytes: int
    prompt_tokens: int
    decoded: float
    encoded: float
    """By all engines."""
    api_servers: int
    engines: int
    picture_us: float
    """CPU time of the API servers for a request, once the picture is known."""
    text_us: float
    """For one of text, of as many tokens."""
    long_text_us: float
    """For one of text, of as many bytes; it is refused if it is too long."""

    def __str__(self) -> str:
        return (
            f"one picture {self.sent:,} times ({self.body_bytes:,} bytes, {self.prompt_tokens:,} tokens), "
            f"{self.api_servers} API servers: decoded {self.decoded:g}, encoded {self.encoded:g} times "
            f"by {self.engines} engines; {self.picture_us:,.0f} us per request, a text of as many "
            f"tokens {self.text_us:,.0f} us ({self.picture_us / self.text_us:.2f} x), one of as many bytes "
            f"{self.long_text_us:,.0f} us ({self.picture_us / self.long_text_us:.2f} x)"
        )


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """Text streams alone and beside pictures, by turns: milliseconds between two events of a stream."""

    streams: int
    megapixels: float
    pictures_per_s: float
    p99_alone_ms: list[float]
    p99_beside_ms: list[float]
    longest_alone_ms: list[float]
    longest_jpeg_ms: list[float]
    """Beside one JPEG file of 20 megapixels."""

    @property
    def ratio(self) -> float:
        """Median of those within a round."""
        pairs = zip(self.p99_beside_ms, self.p99_alone_ms, strict=True)
        return statistics.median(beside / alone for beside, alone in pairs)

    @property
    def delay_ms(self) -> float:
        """Median over the rounds of what the JPEG file adds to the longest gap."""
        pairs = zip(self.longest_jpeg_ms, self.longest_alone_ms, strict=True)
        return statistics.median(jpeg - alone for jpeg, alone in pairs)

    def __str__(self) -> str:
        return (
            f"{self.streams} streams, p99 between events: {_ms(self.p99_alone_ms)} ms alone, "
            f"{_ms(self.p99_beside_ms)} ms beside {self.pictures_per_s:.1f} pictures/s of "
            f"{self.megapixels:g} megapixels: {self.ratio:.2f} x; longest gap {_ms(self.longest_alone_ms)} "
            f"ms, {_ms(self.longest_jpeg_ms)} ms beside a JPEG file of {JPEG_MEGAPIXELS:g}: "
            f"{self.delay_ms:+.1f} ms"
        )


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Pictures per second by media workers, in each round."""

    megapixels: float
    one: list[float]
    two: list[float]

    def __str__(self) -> str:
        ratio = statistics.median(two / one for one, two in zip(self.one, self.two, strict=True))
        return (
            f"pictures/s of {self.megapixels:g} megapixels: {_ms(self.one)} with one media worker, "
            f"{_ms(self.two)} with two: {ratio:.2f} x"
        )


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """Processes killed under load."""

    kills: dict[str, int]
    outcomes: dict[str, int]
    """Requests by status; ``connection``: it died."""
    samples: dict[str, str]
    left_bytes: int
    """In the store after the end of the server."""

    def __str__(self) -> str:
        lost = {each: self.samples[each] for each in self.outcomes if each not in ("200", DIED)}
        return (
            f"kill -9: {self.kills}; requests: {self.outcomes}; {self.left_bytes} bytes left in the store"
            + "".join(f"\n  {outcome}: {said}" for outcome, said in lost.items())
        )


class ImagesReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, of what was asked for."""

    repeated: Repeated | None = None
    beside: Beside | None = None
    scaling: Scaling | None = None
    killed: Killed | None = None
    machine: Machine


def measure(config: BenchImagesConfig, say: ProgressCallback) -> ImagesReport:
    """Run the measurements and end their processes. Raises BenchError."""
    run = _Run(config, Deadline(config.timeout), say)
    found = {each: getattr(run, each)() for each in dict.fromkeys(config.measure)}
    return ImagesReport(**found, machine=this_machine())


def render(report: ImagesReport) -> str:
    """The report as text."""
    found = (report.repeated, report.beside, report.scaling, report.killed)
    return "\n\n".join(str(each) for each in (*found, report.machine) if each is not None)


class _Server(NamedTuple):
    measured: MeasuredServer
    model: str


class _Run:
    """The measurements, each with servers of its own."""

    def __init__(self, config: BenchImagesConfig, deadline: Deadline, say: ProgressCallback) -> None:
        self._config, self._deadline, self._say = config, deadline, say

    def repeated(self) -> Repeated:
        config = self._config
        with contextlib.ExitStack() as stack:
            server, model = self._serve(stack, config.api_server_count, config.engines, config.media_workers)
            pids = server.processes.api_servers
            body = picture_body(model, Png(config.megapixels).url(0))
            count = config.requests
            self._post(server.url, _always(body), max(2, count // 10))  # each API server has had it
            picture_us = self._cost(pids, server.url, body, count - max(2, count // 10))
            tokens = _prompt_tokens(server.url, body)
            decoded, encoded = _counted(server.url, DECODED), _counted(server.url, ENCODED)
            text = text_body(model, WORD * max(1, tokens - 16))
            text_us = self._cost(pids, server.url, text, count)
            long = text_body(model, WORD * (len(body) // len(WORD)))
            long_us = self._cost(pids, server.url, long, max(16, count // 10), "400")
        return Repeated(
            sent=count + 1,
            body_bytes=len(body),
            prompt_tokens=tokens,
            decoded=decoded,
            encoded=encoded,
            api_servers=config.api_server_count,
            engines=config.engines,
            picture_us=picture_us,
            text_us=text_us,
            long_text_us=long_us,
        )

    def beside(self) -> Beside:
        config, png, numbers = self._config, Png(self._config.megapixels), itertools.count()
        alone, beside, longest, with_jpeg, rate = [], [], [], [], []
        with contextlib.ExitStack() as stack:
            host = self._host(config.streams)
            server, model = self._serve(stack, 1, 1, config.media_workers, host)
            load = ServerUnderLoad(host, server, stack, self._deadline)
            jpeg = picture_body(model, jpeg_url(JPEG_MEGAPIXELS))

            def pictures(_: int) -> bytes:
                return picture_body(model, png.url(next(numbers)))

            load.run(self._left("the first round"))
            for number in range(config.rounds):
                found = load.run(self._left("a round")).load
                alone.append(found.itl_ms.p99 or 0.0)
                longest.append(found.itl_ms.max or 0.0)
                with PictureLoad(server.url, pictures, POSTERS) as posts:
                    found = load.run(self._left("a round")).load
                    rate.append(posts.outcomes["200"] / found.wall_s)
                posts.check()
                beside.append(found.itl_ms.p99 or 0.0)
                once = jpeg.replace(b'"max_tokens":1', b'"max_tokens":%d' % (2 + number))
                with PictureLoad(server.url, _always(once), 1, count=1) as posts:
                    with_jpeg.append(load.run(self._left("a round")).load.itl_ms.max or 0.0)
                posts.check()
                self._say(f"round {number + 1} of {config.rounds}")
        return Beside(
            streams=config.streams,
            megapixels=config.megapixels,
            pictures_per_s=statistics.median(rate),
            p99_alone_ms=alone,
            p99_beside_ms=beside,
            longest_alone_ms=longest,
            longest_jpeg_ms=with_jpeg,
        )

    def scaling(self) -> Scaling:
        config, png, numbers = self._config, Png(self._config.megapixels), itertools.count()
        rates: dict[int, list[float]] = {1: [], 2: []}
        count = max(POSTERS, config.requests // 10)
        with contextlib.ExitStack() as stack:
            servers = {workers: self._serve(stack, 1, 1, workers) for workers in rates}
            for number in range(config.rounds + 1):  # the first one is not counted
                for workers, (server, model) in servers.items():
                    bodies = [picture_body(model, png.url(next(numbers))) for _ in range(count)]
                    began = time.perf_counter()
                    self._post(server.url, bodies.__getitem__, count)
                    if number:
                        rates[workers].append(count / (time.perf_counter() - began))
                self._say(f"round {number} of {config.rounds}")
        return Scaling(megapixels=config.megapixels, one=rates[1], two=rates[2])

    def killed(self) -> Killed:
        kills: Counter[str] = Counter()
        outcomes: Counter[str] = Counter()
        samples: dict[str, str] = {}
        left = 0
        while kills.total() < self._config.kills:
            store, posts = self._kill(kills, min(KILLS_PER_SERVER, self._config.kills - kills.total()))
            outcomes += posts.outcomes
            samples |= posts.samples
            left += sum(each.stat().st_size for each in store.rglob("*") if each.is_file())
            self._say(f"{kills.total()} of {self._config.kills} killed: {dict(outcomes)}")
        return Killed(kills=kills, outcomes=outcomes, samples=samples, left_bytes=left)

    def _kill(self, kills: Counter[str], count: int) -> tuple[Path, PictureLoad]:
        """Kill processes of one server, by turns; returns its store and the requests."""
        config, png, numbers = self._config, Png(self._config.megapixels), itertools.count()
        with contextlib.ExitStack() as stack:
            server, model = self._serve(stack, max(2, config.api_server_count), max(2, config.engines), 2)
            assert server.pid is not None, "it was started here"
            wanted = {role: len(_pids(server.pid, role)) for role in ROLES}
            store = _store_of(server.pid)

            def pictures(_: int) -> bytes:  # half of them are new
                return picture_body(model, png.url(next(numbers) // 2), tokens=8)

            posts = stack.enter_context(PictureLoad(server.url, pictures, POSTERS))
            for number in range(count):
                role = ROLES[number % len(ROLES)]
                pids = self._all_up(server.pid, role, wanted[role], server.url)
                psutil.Process(pids[number // len(ROLES) % len(pids)]).kill()
                kills[role] += 1
                time.sleep(min(KILL_INTERVAL_S, self._left("a kill")))
        return store, posts

    # -- servers and requests

    def _left(self, stage: str) -> float:
        return self._deadline.left(stage)

    def _host(self, streams: int = 1) -> BenchHostConfig:
        return BenchHostConfig(streams=streams, tokens=STREAM_TOKENS, step_ms=STEP_MS)

    def _serve(
        self,
        stack: contextlib.ExitStack,
        api_servers: int,
        engines: int,
        workers: int,
        host: BenchHostConfig | None = None,
    ) -> _Server:
        """A server whose engines are stubs, for text streams of ``host`` beside the pictures."""
        config = self._config
        options = {
            "--media-workers": workers,
            "--synthetic-image-tokens": config.image_tokens,
            "--max-request-bytes": MAX_BODY,
            "--max-model-len": 2 * config.image_tokens + 8192,
        }
        args = [f"{name}={value}" for name, value in options.items()] + shlex.split(config.server_args or "")
        given = host or replace(self._host(), step_ms=0.0)
        given = replace(given, engines=engines, server_args=shlex.join(args))
        self._say(f"starting {api_servers} API servers, {engines} engines, {workers} media workers")
        server = start_server(given, api_servers, stack, self._deadline)
        models = httpx.get(
            f"{server.url}/v1/models", timeout=self._left("the first request"), trust_env=False
        )
        return _Server(server, str(models.json()["data"][0]["id"]))

    def _post(self, url: str, body: Callable[[int], bytes], count: int, status: str = "200") -> None:
        """Send ``count`` requests. Raises BenchError unless all get 200, or all ``status``."""
        with PictureLoad(url, body, POSTERS, count=count) as posts:
            posts.wait(self._left("requests with pictures"))
        if posts.outcomes not in ({status: count}, {"200": count}):
            posts.check()

    def _cost(self, pids: Sequence[int], url: str, body: bytes, count: int, status: str = "200") -> float:
        """CPU time of processes per request, in microseconds."""
        before = cpu_time(pids).total
        self._post(url, _always(body), count, status)
        return (cpu_time(pids).total - before) / count * 1e6

    def _all_up(self, supervisor: int, role: str, wanted: int, url: str) -> list[int]:
        """The processes of a role, once all of them run, and all engines take requests: without any the
        server refuses requests (503), which are not lost."""
        while len(pids := _pids(supervisor, role)) < wanted or (role == "engine" and not _engines_ready(url)):
            time.sleep(min(0.05, self._left(f"the restart of a process of role {role}")))
        return pids


def _always(body: bytes) -> Callable[[int], bytes]:
    return lambda number: body


def _pids(supervisor: int, role: str) -> list[int]:
    children = alive(supervisor, lambda process: process.children())
    found = []
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if title(child).startswith(f"penstock: {role}"):
                found.append(child.pid)
    return sorted(found)


def _engines_ready(url: str) -> bool:
    try:
        status = httpx.get(f"{url}/status", timeout=5, trust_env=False).json()
    except (httpx.HTTPError, ValueError):  # of an API server that has been killed
        return False
    return all(each["state"] == "ready" for each in status["engines"])


def _store_of(supervisor: int) -> Path:
    """The directory of a server's pictures: its processes have a file of it open. Raises BenchError."""
    for pid in (*_pids(supervisor, "media-worker"), *_pids(supervisor, "api-server")):
        for file in alive(pid, lambda process: process.open_files()):
            if Path(file.path).name == "account":
                return Path(file.path).parent
    raise BenchError("no process of the server has its store of pictures open")


def _prompt_tokens(url: str, body: bytes) -> int:
    reply = httpx.post(f"{url}/v1/chat/completions", content=body, timeout=60, trust_env=False)
    return int(reply.json()["usage"]["prompt_tokens"])


def _counted(url: str, name: str) -> float:
    """A counter, summed over the series that begin so."""
    text = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
    lines = (line for line in text.splitlines() if line.startswith(name))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _ms(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)
