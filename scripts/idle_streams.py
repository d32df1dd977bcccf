"""What streams cost a gateway in which nothing comes: the memory of each, and the CPU time of all.

``python -m scripts.idle_streams`` prints the same of WebSockets of an API server, which no response uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

from penstock.bench.process_usage import ServerPids, cpu_time, pids_of_supervisor
from penstock.bench.server_process import ServerProcess
from penstock.http.http1.reply_framing import header_lines
from penstock.http.websocket.handshake import new_key, opening

STREAMS = 10_000
OTHER_FILES = 1000
"""Files of a gateway that are none of its streams."""
AT_ONCE = 100
"""Streams that are being opened."""
OPENING_S = 300.0
"""Time for all streams to begin."""
SETTLE_S, WATCHED_S = 2.0, 10.0
"""Seconds before the measurement, and its duration."""
SCRIPT = {"rules": [{"reply": {"text": "one and no more"}, "end": "stall", "after-tokens": 1}]}


class RefusedError(Exception):
    """The gateway does not take so many streams."""


class IdleCost(NamedTuple):
    """What streams that say nothing cost a gateway."""

    kib: float
    """Memory of one, in KiB, that no other process shares."""
    cpu_ms: float
    """CPU time of all, in milliseconds per second."""


def stream_count() -> int:
    """Streams that a gateway can hold: each has a connection on both sides, over HTTP/1.1."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return STREAMS if most == resource.RLIM_INFINITY else min(STREAMS, (most - OTHER_FILES) // 2)


@contextlib.contextmanager
def silent_server(streams: int, seconds: float) -> Iterator[str]:
    """A server whose streams say one token; yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.json")
        script.write_text(json.dumps(SCRIPT))
        options = ["--engine=synthetic", "--port=0", f"--synthetic-script={script}", "--drain-timeout=0"]
        options.append(f"--max-num-seqs={streams}")
        with ServerProcess(["serve", *options], seconds) as server:
            yield server.url


def idle_cost(url: str, processes: ServerPids, streams: int) -> IdleCost:
    """Open ``streams`` through the gateway at ``url``, and measure its ``processes`` while they are open.
    Raises RefusedError."""
    with httpx.Client(base_url=url, trust_env=False, timeout=30.0) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
    pids = processes.api_servers
    try:
        return asyncio.run(_measure(lambda: _open_stream(url, model), pids, streams))
    except* RefusedError as refusals:
        refusal = refusals.exceptions[0]
    raise refusal


def _memory(pids: tuple[int, ...]) -> int:
    return sum(psutil.Process(pid).memory_full_info().uss for pid in pids)


async def _measure(
    open_stream: Callable[[], Awaitable[asyncio.StreamWriter]], pids: tuple[int, ...], streams: int
) -> IdleCost:
    before = _memory(pids)
    places, opened = asyncio.Semaphore(AT_ONCE), list[asyncio.StreamWriter]()

    async def open_one() -> None:
        async with places:
            opened.append(await open_stream())

    try:
        async with asyncio.timeout(OPENING_S), asyncio.TaskGroup() as tasks:
            for _ in range(streams):
                tasks.create_task(open_one())
        await asyncio.sleep(SETTLE_S)
        after, began = _memory(pids), cpu_time(pids).total
        await asyncio.sleep(WATCHED_S)
        cpu_s = cpu_time(pids).total - began
        return IdleCost((after - before) / streams / 1024, cpu_s / WATCHED_S * 1000)
    finally:
        for writer in opened:
            writer.transport.abort()


async def _open_stream(url: str, model: str) -> asyncio.StreamWriter:
    """A stream that has begun."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=4096)
    chat = {"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    body = json.dumps(chat).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RefusedError(f"status {head[9:12].decode('latin-1')}")
    await reader.readuntil(b"one")
    return writer


async def _open_websocket(url: str) -> asyncio.StreamWriter:
    """A WebSocket at ``/v1/responses``, with headers as clients send them."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=4096)
    headers = [(b"host", b"x"), (b"user-agent", b"OpenAI/Python"), (b"authorization", b"Bearer key")]
    writer.write(b"GET /v1/responses HTTP/1.1\r\n%b\r\n" % header_lines([*headers, *opening(new_key())]))
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 101 " not in head.partition(b"\r\n")[0]:
        raise RefusedError(f"status {head[9:12].decode('latin-1')}")
    return writer


def main() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sockets = STREAMS if most == resource.RLIM_INFINITY else min(STREAMS, most - OTHER_FILES)
    with ServerProcess(["serve", "--engine=synthetic", "--port=0"], OPENING_S) as server:
        pids = pids_of_supervisor(server.pid).api_servers
        cost = asyncio.run(_measure(lambda: _open_websocket(server.url), pids, sockets))
    print(f"{sockets} idle WebSockets: {cost.kib:.1f} KiB each, {cost.cpu_ms:.0f} ms/s of CPU for all")


if __name__ == "__main__":
    main()
