"""``penstock bench embed``: CPU time of API servers per request for vectors, beside another server's."""

from __future__ import annotations

import base64
import contextlib
import statistics
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.embed.delay import Delay, measure_delay
from penstock.bench.embed.whole_replies import WholeReplies
from penstock.bench.errors import BenchError
from penstock.bench.load.latency import Latency
from penstock.bench.machine import Machine, this_machine
from penstock.bench.process_usage import ServerPids, cpu_time, pids_of_supervisor, resolve_pids
from penstock.bench.server_process import ServerProcess, serve_command
from penstock.bench.tables import format_table
from penstock.config.bench import BenchEmbedConfig

PATH = "/v1/embeddings"
WORDS_PER_TOKEN = 0.7
"""About; the report has the tokens that the server counted."""
DIFFERENT = 64
"""Bodies, used in turn."""
WARM_REQUESTS = 200
MODEL_LEN = 8192
ENCODINGS = {"float": "float", "base64": "base64", "binary": "bytes"}
"""``encoding_format`` of each format; the last one is vLLM's."""


class EmbeddingServer(NamedTuple):
    """One of the measured servers."""

    name: str
    url: str
    pids: ServerPids


class FormatCost(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds of one server's replies of one format."""

    server: str
    format: str
    requests_per_cpu_s: float
    us_per_request: float
    """CPU time of the API servers."""
    engine_us_per_request: float | None
    """None: of another server."""
    requests_per_s: float
    latency_ms: Latency
    """Of the last round."""
    body_bytes: int


class EmbedReport(msgspec.Struct, frozen=True, kw_only=True):
    """What replies cost, by server and format."""

    inputs: int
    tokens_per_input: float
    dimensions: int
    concurrency: int
    requests: int
    rounds: int
    costs: list[FormatCost]
    ratios: dict[str, float]
    """Medians of the ratios within a round."""
    delay: Delay | None
    machine: Machine


class _Round(NamedTuple):
    """One server's replies of one format."""

    api_server_s: float
    engine_s: float
    requests_per_s: float
    latency: Latency
    body_bytes: int


def measure(config: BenchEmbedConfig, say: ProgressCallback) -> EmbedReport:
    """Run the measurement and end its processes. Raises BenchError."""
    deadline = Deadline(config.timeout)
    with contextlib.ExitStack() as stack:
        servers = list(_servers(config, stack, deadline, say))
        loads = [_Load(config, server, stack, deadline) for server in servers]
        keys = [(load, kind) for load in loads for kind in config.formats]
        for load, kind in keys:
            load.run(kind, min(WARM_REQUESTS, config.requests), deadline)
        rounds: dict[tuple[str, str], list[_Round]] = {(load.server.name, kind): [] for load, kind in keys}
        for number in range(1, config.rounds + 1):
            for load, kind in keys:
                rounds[load.server.name, kind].append(load.run(kind, config.requests, deadline))
            say(f"round {number} of {config.rounds}")
        delay = None
        if config.beside:
            say(f"requests alone and beside those of {config.beside:,} inputs")
            delay = loads[0].delay(config, deadline)
    return EmbedReport(
        inputs=config.inputs,
        tokens_per_input=loads[0].tokens / config.inputs,
        dimensions=loads[0].dimensions,
        concurrency=config.concurrency,
        requests=config.requests,
        rounds=config.rounds,
        costs=[_cost(config, *key, found) for key, found in rounds.items()],
        ratios=_ratios(servers, rounds),
        delay=delay,
        machine=this_machine(),
    )


def render(report: EmbedReport) -> str:
    """The report as a table."""
    rows = [("", "requests per CPU-s", "us/request", "engine, us", "requests/s", "p99, ms", "body, bytes")]
    for each in report.costs:
        engine = each.engine_us_per_request
        rows.append(
            (
                f"{each.server} {each.format}",
                f"{each.requests_per_cpu_s:,.0f}",
                f"{each.us_per_request:,.0f}",
                "-" if engine is None else f"{engine:,.0f}",
                f"{each.requests_per_s:,.0f}",
                f"{each.latency_ms.p99:,.1f}",
                f"{each.body_bytes:,}",
            )
        )
    lines = [
        f"{report.inputs} inputs of {report.tokens_per_input:.0f} tokens, {report.dimensions:,} dimensions; "
        f"{report.concurrency} at a time, {report.requests:,} requests, median of {report.rounds}",
        *format_table(rows),
        *(f"{name}: {value:.2f}" for name, value in report.ratios.items()),
    ]
    if report.delay is not None:
        lines += ["", str(report.delay)]
    return "\n".join((*lines, "", str(report.machine)))


# -- servers and loads


def _servers(
    config: BenchEmbedConfig, stack: contextlib.ExitStack, deadline: Deadline, say: ProgressCallback
) -> Iterator[EmbeddingServer]:
    options = {
        "--engine": "synthetic",
        "--runner": "pooling",
        "--synthetic-dimensions": config.dimensions,
        "--synthetic-step-ms": config.step_ms,
        "--port": 0,
        "--max-model-len": MODEL_LEN,
        "--max-num-seqs": max(1024, config.concurrency),
        "--drain-timeout": 1,
    }
    command, *arguments = serve_command(options, config.server_args)
    model = [] if config.model is None else [config.model]
    say("starting penstock serve --engine synthetic")
    left = deadline.left("the start of the server")
    server = stack.enter_context(ServerProcess([command, *model, *arguments], left))
    yield EmbeddingServer("penstock", server.url, pids_of_supervisor(server.pid))
    if config.compare_url is not None:
        url = config.compare_url.rstrip("/").removesuffix("/v1")
        yield EmbeddingServer("other", url, resolve_pids(config.compare_pid or []))


class _Load:
    """Requests to one server, which are checked once for each format."""

    def __init__(
        self,
        config: BenchEmbedConfig,
        server: EmbeddingServer,
        stack: contextlib.ExitStack,
        deadline: Deadline,
    ) -> None:
        self.server = server
        self._client = stack.enter_context(WholeReplies(server.url, config.concurrency))
        left = deadline.left("the first request")
        models = msgspec.json.decode(self._client.one(self._client.get("/v1/models"), left).body)
        self.model = str(models["data"][0]["id"])
        self.dimensions = self.tokens = 0
        self._requests: dict[str, list[bytes]] = {}
        for kind in config.formats:
            bodies = [_body(config, self.model, kind, number) for number in range(DIFFERENT)]
            self._requests[kind] = [self._client.post(PATH, body) for body in bodies]
            reply = self._client.one(self._requests[kind][0], deadline.left("the first request"))
            self.dimensions, self.tokens = _check(server, kind, reply.headers, reply.body, config.inputs)

    def run(self, kind: str, count: int, deadline: Deadline) -> _Round:
        pids = self.server.pids
        before = cpu_time(pids.api_servers).total, cpu_time(pids.engines).total
        found = self._client.run(self._requests[kind], count, deadline.left("a round"))
        after = cpu_time(pids.api_servers).total, cpu_time(pids.engines).total
        return _Round(
            (after[0] - before[0]) / count,
            (after[1] - before[1]) / count,
            count / found.wall_s,
            found.latency_ms,
            found.body_bytes // count,
        )

    def delay(self, config: BenchEmbedConfig, deadline: Deadline) -> Delay:
        """Of the requests of the first format, by those of many inputs."""
        kind = config.formats[0]
        large = self._client.post(PATH, _body(config, self.model, kind, 0, config.beside))
        requests, count = self._requests[kind], config.requests
        return measure_delay(self._client, requests, large, config.beside, count, config.rounds, deadline)


def _body(config: BenchEmbedConfig, model: str, kind: str, number: int, inputs: int = 0) -> bytes:
    """``number``: of a body; each has other texts. ``inputs``: in place of the option."""
    words = " ".join(topics.values()).split()
    size = max(1, round(config.tokens * WORDS_PER_TOKEN))
    texts = []
    for index in range(inputs or config.inputs):
        start = (number * 7919 + index * 104_729) % (len(words) - size)
        texts.append(" ".join(words[start : start + size]))
    given = texts if len(texts) > 1 else texts[0]
    return msgspec.json.encode({"model": model, "input": given, "encoding_format": ENCODINGS[kind]})


def _check(
    server: EmbeddingServer, kind: str, headers: dict[bytes, bytes], body: bytes, inputs: int
) -> tuple[int, int]:
    """Dimensions and prompt tokens of a reply. Raises BenchError unless it has a vector for each input."""
    try:
        if kind == "binary":
            reply = msgspec.json.decode(headers[b"metadata"])
            vectors = np.frombuffer(body, "<f4").reshape(inputs, -1)
        else:
            reply = msgspec.json.decode(body)
            given = [each["embedding"] for each in reply["data"]]
            if kind == "base64":
                given = [np.frombuffer(base64.b64decode(each), "<f4") for each in given]
            vectors = np.array(given, np.float32)
        if len(vectors) != inputs or vectors.ndim != 2:
            raise ValueError(f"{vectors.shape} values for {inputs} inputs")
        return vectors.shape[1], int(reply["usage"]["prompt_tokens"])
    except (KeyError, ValueError, TypeError, msgspec.DecodeError) as error:
        raise BenchError(f"a reply of {server.name} as {kind} is none: {error!r}") from None


# -- results


def _cost(config: BenchEmbedConfig, server: str, kind: str, rounds: list[_Round]) -> FormatCost:
    seconds = statistics.median(each.api_server_s for each in rounds)
    engine = statistics.median(each.engine_s for each in rounds)
    return FormatCost(
        server=server,
        format=kind,
        requests_per_cpu_s=1 / seconds,
        us_per_request=1e6 * seconds,
        engine_us_per_request=1e6 * engine if engine else None,
        requests_per_s=statistics.median(each.requests_per_s for each in rounds),
        latency_ms=rounds[-1].latency,
        body_bytes=rounds[-1].body_bytes,
    )


def _ratios(servers: list[EmbeddingServer], rounds: dict[tuple[str, str], list[_Round]]) -> dict[str, float]:
    """Of CPU time per request."""
    own = servers[0].name
    pairs = {
        f"{kind}, other / {own}": (found, rounds[own, kind])
        for (name, kind), found in rounds.items()
        if name != own
    }
    for kind in ("float", "base64"):
        if {(own, kind), (own, "binary")} <= rounds.keys():
            pairs[f"{own} {kind} / binary"] = rounds[own, kind], rounds[own, "binary"]
    return {
        name: statistics.median(a.api_server_s / b.api_server_s for a, b in zip(*both, strict=True))
        for name, both in pairs.items()
    }
