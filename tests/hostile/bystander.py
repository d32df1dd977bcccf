"""An honest client in a process of its own, that measures the gaps between the events of its stream.

``python -m tests.hostile.bystander URL KEY [PID ...]`` streams completions one after the other until its
standard input closes, and writes one JSON line then. What the machine delays is no part of the gaps: the time
for which the main threads of these processes, and this one, waited for a CPU, as Linux counts it. A second
clock in the same process ticks meanwhile: how late its ticks come is the machine's share, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import msgspec
import psutil

INTERVAL_MS = 50
"""Milliseconds between two events, as the request asks for. A step of the engine takes less."""
TICK_S = 0.01
START_S = 60.0
END_S = 60.0
FLOOR_S = 0.02
"""Least usual gap that is believed."""


class Gaps(msgspec.Struct, frozen=True):
    """What a bystander measured; seconds."""

    usual: float
    """Median."""
    worst: float
    """Without the time for which processes waited for a CPU."""
    lateness: float
    """Greatest lateness of a tick."""
    events: int
    broken: list[str]
    """Replies that were not whole."""

    @property
    def ratio(self) -> float:
        """The worst gap without the machine's share, in usual gaps."""
        return max(0.0, self.worst - self.lateness) / max(self.usual, FLOOR_S)


class Bystander:
    """The process; use it as a context, inside which others attack."""

    def __init__(self, url: str, processes: Sequence[psutil.Process], key: str = "") -> None:
        """``processes``: those that the stream comes through."""
        pids = [str(process.pid) for process in processes]
        command = [sys.executable, "-m", "tests.hostile.bystander", url, key, *pids]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.gaps: Gaps

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "streaming\n", "the bystander got no event"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            written, _ = self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        if error is None:
            self.gaps = msgspec.json.decode(written, type=Gaps)


class _Waits:
    """For how long the main threads of processes were ready to run and waited for a CPU."""

    def __init__(self, pids: Sequence[str]) -> None:
        self._waited_ns = dict.fromkeys(pids, 0)

    def seconds(self) -> float:
        """Since the processes began."""
        for pid in self._waited_ns:
            with contextlib.suppress(OSError):  # it has ended, or this is no Linux
                self._waited_ns[pid] = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
        return sum(self._waited_ns.values()) / 1e9


class _Client:
    """Streams one completion after the other over one connection at a time."""

    def __init__(self, url: str, key: str, pids: Sequence[str]) -> None:
        self._key = key
        self._waits = _Waits(pids)
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self.gaps: list[float] = []
        self.broken: list[str] = []
        self.events = 0
        self._last = 0.0

    async def run(self) -> None:
        while True:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                while await self._stream(reader, writer):
                    pass
            except (OSError, asyncio.IncompleteReadError) as error:
                self.broken.append(repr(error))
            finally:
                writer.close()

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One reply; False when it was not whole."""
        fields = {"prompt": "x", "stream": True, "stream_interval_ms": INTERVAL_MS, "ignore_eos": True}
        body = json.dumps(fields | {"max_tokens": 200}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {self._key}\r\n" if self._key else ""
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        start = await reader.readuntil(b"\r\n\r\n")
        if not start.startswith(b"HTTP/1.1 200"):
            self.broken.append(repr(start))
            await asyncio.sleep(TICK_S)
            return False
        last, done = 0.0, False
        while True:
            size = int(await reader.readuntil(b"\r\n"), 16)
            data = await reader.readexactly(size + 2)
            if not size:
                break
            now = time.perf_counter() - self._waits.seconds()
            self.events += 1
            if last:
                self.gaps.append(now - last)
            elif not self.events - 1:
                print("streaming", flush=True)
            last, done = now, b"data: [DONE]" in data
            if b'data: {"error"' in data:
                self.broken.append(repr(data))
        if not done:
            self.broken.append("a stream without [DONE]")
        return done


async def _ticks(late: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        late.append(time.perf_counter() - before - TICK_S)


async def _main(url: str, key: str, *pids: str) -> None:
    client, late = _Client(url, key, [*pids, "self"]), [0.0]
    tasks = [asyncio.create_task(client.run()), asyncio.create_task(_ticks(late))]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    gaps = client.gaps or [0.0]
    found = Gaps(statistics.median(gaps), max(gaps), max(late), client.events, client.broken[:10])
    print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
