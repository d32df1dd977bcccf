"""``penstock size``: processes, cores and memory for a load, from what a token costs on this machine."""

from __future__ import annotations

import json
from math import ceil
from typing import TYPE_CHECKING

import msgspec

from penstock.cli.command import Command
from penstock.config.bench import BenchHostConfig, SizeConfig
from penstock.config.origins import Origins

if TYPE_CHECKING:  # penstock.bench imports httpx, numpy and psutil
    from penstock.bench.deadline import ProgressCallback

IDLE_BYTES = 95 << 20
STREAM_BYTES, HTTP2_STREAM_BYTES = 14_000, 6_400
"""Of an API server: resident when it has started, and for each stream (docs/benchmarks.md)."""
CACHE_BYTES = 510 << 20
"""Caches of an API server at their bounds (docs/serving.md), with --turn-memory at its default."""
GATEWAY_IDLE_BYTES = 50 << 20
GATEWAY_EVENTS_PER_S = {False: 40_000, True: 80_000}
"""Of one worker that takes a whole core, by HTTP/2 to the servers (docs/gateway.md)."""
ENGINE_CORES = 1
"""The loop of an engine, which waits for its device."""
SPARE_FILES = 200
"""Open files of a process beside its connections."""
TRIED_SHARE = 0.3
"""Share of a core of the measured server: one that falls behind merges events, and seems cheap."""
ROUND_S = 6.0
GUESS_US = 12.0
"""Microseconds per event, to choose the number of streams to measure with."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What a load needs. Memory in bytes, without the engines'."""

    tokens_per_s: float
    events_per_s: float
    cpu_us_per_token: float
    measured: bool
    api_servers: int
    api_server_share: float
    """Of a core, each."""
    engines: int
    gateway_workers: int
    cores: int
    api_server_bytes: int
    cache_bytes: int
    gateway_bytes: int
    open_files: int


def size(config: SizeConfig, say: ProgressCallback) -> Size:
    """Compute what the load needs. Raises BenchError when nothing can be measured."""
    cost, idle = config.cpu_us_per_token, IDLE_BYTES
    if cost is None:
        cost, idle = _measure(config, say)
    tokens_per_s = config.streams * config.tokens_per_second
    events_per_s = tokens_per_s / config.stream_interval
    cpu = tokens_per_s * cost / 1e6
    servers = max(1, ceil(cpu / config.load))
    engines = ceil(config.streams / config.engine_streams)
    if config.engine_tokens_per_second is not None:
        engines = max(engines, ceil(tokens_per_s / config.engine_tokens_per_second))
    workers = 0
    if config.gateway:
        workers = max(1, ceil(events_per_s / GATEWAY_EVENTS_PER_S[config.http2] / config.load))
    each = ceil(config.streams / servers)
    stream_bytes = HTTP2_STREAM_BYTES if config.http2 else STREAM_BYTES
    return Size(
        tokens_per_s=tokens_per_s,
        events_per_s=events_per_s,
        cpu_us_per_token=round(cost, 2),
        measured=config.cpu_us_per_token is None,
        api_servers=servers,
        api_server_share=round(cpu / servers, 3),
        engines=engines,
        gateway_workers=workers,
        cores=ceil(cpu / config.load) + engines * ENGINE_CORES + workers,
        api_server_bytes=idle + each * stream_bytes,
        cache_bytes=CACHE_BYTES,
        gateway_bytes=GATEWAY_IDLE_BYTES if workers else 0,
        open_files=SPARE_FILES + (0 if config.http2 else each),
    )


def _measure(config: SizeConfig, say: ProgressCallback) -> tuple[float, int]:
    """CPU microseconds of an API server per token of this load, and its resident bytes before it."""
    from penstock.bench import host_benchmark
    from penstock.bench.errors import BenchError

    rate = config.tokens_per_second
    fits = int(TRIED_SHARE * 1e6 / (rate / config.stream_interval * GUESS_US))
    tokens = max(1, min(config.output_tokens, int(ROUND_S * rate)))
    benchmark = BenchHostConfig(
        streams=max(1, min(config.streams, fits, 1024)),
        http2=config.http2,
        endpoint=config.endpoint,
        tokens=tokens,
        prompt_tokens=min(config.prompt_tokens, 2000),
        step_ms=1000 / rate,
        stream_interval=config.stream_interval,
        rounds=2,
    )
    found = host_benchmark.measure(benchmark, say)
    if not found.tokens_per_cpu_s:
        raise BenchError("; ".join(found.error_samples) or "no request succeeded")
    return 1e6 / found.tokens_per_cpu_s, found.memory.idle_bytes


def render(config: SizeConfig, found: Size) -> str:
    """The report as text."""
    from penstock.bench.tables import format_table

    how = "measured on this machine" if found.measured else "as given"
    speed = f"{found.tokens_per_s:,.0f} tokens/s, {found.events_per_s:,.0f} events/s"
    protocol = "HTTP/2" if config.http2 else "HTTP/1.1"
    cost = f"{found.cpu_us_per_token} us per token, {how}"
    rows = [
        (
            "--api-server-count",
            str(found.api_servers),
            f"{found.api_server_share:.0%} of a core each; {cost}",
        ),
        (
            "--data-parallel-size",
            str(found.engines),
            f"{config.engine_streams:,} streams each (--engine-streams)",
        ),
        (
            "cores",
            str(found.cores),
            f"API servers at {config.load:.0%} of a core, one for each engine's loop",
        ),
        (
            "memory",
            _mib(found.api_server_bytes),
            "of each API server with its streams; engines' not included",
        ),
        (
            "",
            _mib(found.cache_bytes),
            "more of each API server once its caches are full, 256 MiB --turn-memory",
        ),
        ("ulimit -n", str(found.open_files), "of each API server"),
    ]
    if found.gateway_workers:
        most = GATEWAY_EVENTS_PER_S[config.http2]
        rows[2] = ("cores", str(found.cores), rows[2][2] + " and each worker")
        rows += [
            (
                "gateway --workers",
                str(found.gateway_workers),
                f"{most:,} events/s fill a core; not measured here",
            ),
            ("", _mib(found.gateway_bytes), "of each worker, and 100 MiB once its caches are full"),
        ]
    head = f"{config.streams:,} streams, {speed}, {config.endpoint} over {protocol}"
    return "\n".join([head, "", *format_table(rows)])


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def run(config: SizeConfig, origins: Origins) -> int:
    """Print a table or JSON. 1 when nothing could be measured."""
    from penstock.cli.bench import run_measurement

    def shown(found: Size) -> str:
        return json.dumps(msgspec.to_builtins(found)) if config.json else render(config, found)

    return 1 if run_measurement(lambda say: size(config, say), shown, None) is None else 0


COMMAND = Command(
    ("size",),
    "Say how many processes and how much memory a load needs.",
    SizeConfig,
    run,
    examples=(
        (
            "penstock size --streams 5000 --tokens-per-second 30",
            "measure a token here, for a minute, then compute",
        ),
        ("penstock size --streams 5000 --cpu-us-per-token 15", "compute only"),
    ),
)
