"""``penstock bench columns``: CPU time of a reply with logprobs as columns, beside the same reply as JSON."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import numpy as np

from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.errors import BenchError
from penstock.bench.machine import Machine, this_machine
from penstock.bench.process_usage import cpu_time, pids_of_supervisor
from penstock.bench.server_process import ServerProcess, serve_command
from penstock.bench.tables import format_table
from penstock.config.bench import BenchColumnsConfig

COLUMNS, JSON = "application/vnd.safetensors", "application/json"
PROMPT = "Once upon a time"
PROMPT_ROOM = 64
"""Tokens that the prompt has at most."""
WARM_TOKENS = 16
_TYPES = {"I64": np.int64, "I32": np.int32, "F32": np.float32}


class ReplyCost(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds of one content type."""

    kind: str
    api_server_us_per_token: float
    client_ms: float
    """CPU time to decode a body: ``json.loads``, or views of numpy."""
    body_bytes: int


class ColumnsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a reply by content type."""

    tokens: int
    logprobs: int
    rounds: int
    replies: list[ReplyCost]
    machine: Machine


def measure(config: BenchColumnsConfig, say: ProgressCallback) -> ColumnsReport:
    """Run the measurement and end its processes. Raises BenchError."""
    deadline = Deadline(config.timeout)
    options = {
        "--engine": "synthetic",
        "--port": 0,
        "--synthetic-step-ms": 0,
        "--max-model-len": config.tokens + PROMPT_ROOM,
        "--max-num-seqs": config.choices,
        "--max-logprobs": config.logprobs,
        "--drain-timeout": 1,
    }
    say("starting penstock serve --engine synthetic")
    arguments = serve_command(options, config.server_args)
    with (
        ServerProcess(arguments, deadline.left("the start of the server")) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        api_servers = pids_of_supervisor(server.pid).api_servers

        def ask(kind: str, tokens: int) -> tuple[float, float, int]:
            """Seconds of CPU of the API servers and of the client, and the body's bytes."""
            before = cpu_time(api_servers)
            body = _body(http, kind, _request(config, tokens), deadline.left("a reply"))
            served = (cpu_time(api_servers) - before).total
            start = time.process_time()
            found = _READERS[kind](body)
            taken = time.process_time() - start
            if found != tokens * config.choices:
                raise BenchError(f"a reply as {kind} has {found} tokens, not {tokens * config.choices}")
            return served, taken, len(body)

        costs: dict[str, list[tuple[float, float, int]]] = {COLUMNS: [], JSON: []}
        for kind in costs:
            ask(kind, min(WARM_TOKENS, config.tokens))
        for number in range(1, config.rounds + 1):
            for kind, found in costs.items():
                found.append(ask(kind, config.tokens))
            say(f"round {number} of {config.rounds}")
    total = config.tokens * config.choices
    replies = []
    for kind, found in costs.items():
        served, taken, sizes = (statistics.median(column) for column in zip(*found, strict=True))
        replies.append(
            ReplyCost(
                kind=kind,
                api_server_us_per_token=1e6 * served / total,
                client_ms=1e3 * taken,
                body_bytes=int(sizes),
            )
        )
    return ColumnsReport(
        tokens=total,
        logprobs=config.logprobs,
        rounds=config.rounds,
        replies=replies,
        machine=this_machine(),
    )


def render(report: ColumnsReport) -> str:
    """The report as a table."""
    machine = report.machine
    rows = [("", "API server, us/token", "client, ms", "body, bytes")]
    rows += [
        (each.kind, f"{each.api_server_us_per_token:.3f}", f"{each.client_ms:.3f}", f"{each.body_bytes:,}")
        for each in report.replies
    ]
    return "\n".join(
        (
            f"CPU time of a reply of {report.tokens:,} tokens, logprobs with {report.logprobs} alternatives, "
            f"median of {report.rounds}",
            *format_table(rows),
            "",
            f"{machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.python}",
        )
    )


def _request(config: BenchColumnsConfig, tokens: int) -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "n": config.choices,
        "max_tokens": tokens,
        "ignore_eos": True,
        "logprobs": config.logprobs,
        "return_token_ids": True,
    }


def _body(http: httpx.Client, kind: str, request: dict[str, Any], seconds: float) -> bytes:
    try:
        reply = http.post("/v1/completions", json=request, headers={"accept": kind}, timeout=seconds)
    except httpx.HTTPError as error:
        raise BenchError(f"a reply as {kind} did not come: {error!r}") from None
    if reply.status_code != 200 or reply.headers["content-type"] != kind:
        raise BenchError(f"a request for {kind} was answered with {reply.status_code}: {reply.text[:300]}")
    return reply.content


def _read_columns(body: bytes) -> int:
    """Decode a reply as docs/columns.md says. Returns its tokens."""
    start = 8 + int.from_bytes(body[:8], "little")
    header, data = json.loads(body[8:start]), memoryview(body)[start:]
    del header["__metadata__"]
    columns = {
        name: np.frombuffer(data[slice(*it["data_offsets"])], _TYPES[it["dtype"]]).reshape(it["shape"])
        for name, it in header.items()
    }
    return len(columns["token_ids"])


def _read_json(body: bytes) -> int:
    return sum(len(choice["token_ids"]) for choice in json.loads(body)["choices"])


_READERS: dict[str, Callable[[bytes], int]] = {COLUMNS: _read_columns, JSON: _read_json}
