"""The load client: many streams over raw sockets, at the least possible CPU time.

Runs as ``python -m penstock.bench.load_client``, started by :mod:`penstock.bench.load_process`. Reads lines
of JSON from standard input, a LoadPlan and then a RoundOrder per round, and answers each with a line on
standard output. Exits when standard input is closed.

An event takes one read and a few searches in bytes: JSON is not parsed, no object is created per event. See
``docs/benchmarks.md`` for what is not checked therefore.
"""

from __future__ import annotations

import gc
import resource
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.bench.latency import Latency, ReadLog
from penstock.bench.reply_counter import ERROR, EVENT, ReplyCounter

WHOLE_EVENTS = (b"}\n\n\r\n", b"}\n\n")
"""Ends of a read that holds only whole JSON events, with or without the end of a chunk."""
BATCH = 64
"""Ready connections taken from the kernel at once. They share a timestamp, which limits its error."""
READ_BYTES = 65536
SAMPLES = 5  # different errors in a result
SPARE_DESCRIPTORS = 64


class LoadPlan(msgspec.Struct, frozen=True):
    """Server, requests and connections. Requests use the ``bodies`` (JSON texts) in turn."""

    host: str
    port: int
    path: str
    bodies: list[str]
    connections: int
    in_flight: int
    requests: int
    api_key: str | None = None


class RoundOrder(msgspec.Struct, frozen=True):
    """Run one round within ``seconds``. ``keep``: its latencies count in the totals of later results."""

    keep: bool
    seconds: float


class LoadReady(msgspec.Struct, frozen=True, tag="ready"):
    """All connections are open."""


class LoadFailure(msgspec.Struct, frozen=True, tag="failure"):
    """The load client stops."""

    reason: str


class RoundResult(msgspec.Struct, frozen=True, tag="round"):
    """Results of one round. ``errors`` counts failed requests; times are in seconds.

    ``ttft_ms`` and ``itl_ms`` are for this round, ``all_ttft_ms`` and ``all_itl_ms`` for all kept rounds.
    """

    requests: int
    errors: int
    error_samples: list[str]
    events: int
    bytes: int
    wall_s: float
    cpu_s: float
    ttft_ms: Latency
    itl_ms: Latency
    all_ttft_ms: Latency
    all_itl_ms: Latency


LoadMessage = LoadReady | LoadFailure | RoundResult


class LoadError(Exception):
    """The server is unreachable, or did not finish in time."""


class LoadClient:
    """Runs the requests of a LoadPlan. ``poll``: use poll() even where epoll is available."""

    def __init__(self, plan: LoadPlan, *, poll: bool = False) -> None:
        self._plan = plan
        self._requests = [request_bytes(plan, body.encode()) for body in plan.bodies]
        self._poller, self._wait = _poller(poll)
        self._buffer = bytearray(READ_BYTES)
        self._kept: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []

        # -- per connection, by descriptor
        self._sockets: dict[int, socket.socket] = {}
        self._receive: dict[int, Callable[[bytearray], int]] = {}
        self._unsent: dict[int, memoryview] = {}
        self._idle: deque[int] = deque()

        # -- per request in flight, by descriptor
        self._replies: dict[int, tuple[int, ReplyCounter]] = {}
        # All but those in the middle of a stream, whose next read most likely holds whole events.
        self._careful: set[int] = set()

        # -- per round
        self._log = ReadLog()
        self._errors: list[str] = []
        self._read_bytes = 0

    def open(self) -> None:
        """Opens all connections. Raises LoadError."""
        for _ in range(self._plan.connections):
            self._connect()

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()

    def run(self, order: RoundOrder) -> RoundResult:
        """Runs one round. Raises LoadError when the server is unreachable or the time limit is exceeded."""
        self._renew_idle()
        log = self._log = ReadLog()
        self._errors = []
        self._read_bytes = 0
        cpu, begin = time.process_time(), time.perf_counter()
        self._drive(begin + order.seconds)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
        latencies = log.latencies()
        if order.keep:
            self._kept.append(latencies)
        ttft, itl = (Latency.of(part) for part in latencies)
        kept = zip(*(self._kept or [latencies]), strict=True)
        all_ttft, all_itl = (Latency.of(np.concatenate(parts)) for parts in kept)
        return RoundResult(
            requests=len(log.starts),
            errors=len(self._errors),
            error_samples=list(dict.fromkeys(self._errors))[:SAMPLES],
            events=log.events,
            bytes=self._read_bytes,
            wall_s=wall,
            cpu_s=cpu,
            ttft_ms=ttft,
            itl_ms=itl,
            all_ttft_ms=all_ttft,
            all_itl_ms=all_itl,
        )

    # -- a round

    def _drive(self, deadline: float) -> None:
        """Starts the requests of the round and reads until all have finished."""
        log, careful, receive, wait = self._log, self._careful, self._receive, self._wait
        buffer, clock = self._buffer, time.perf_counter
        append_entry, append_count = log.entries.append, log.counts.append
        ends_with, find, count = buffer.endswith, buffer.find, buffer.count
        for _ in range(self._plan.in_flight):
            self._start_next()
        now = clock()
        while self._replies:
            if now > deadline:
                raise LoadError(self._late())
            total = fd = 0
            try:
                for fd, mask in wait(deadline - now):
                    if mask != select.POLLIN:
                        self._handle_unusual(fd, mask)
                        continue
                    size = receive[fd](buffer)
                    total += size
                    # Fast path of nearly all events.
                    if fd not in careful and ends_with(WHOLE_EVENTS, 0, size) and find(ERROR, 0, size) < 0:
                        append_entry(fd)
                        append_count(count(EVENT, 0, size))
                    else:
                        self._read_carefully(fd, bytes(memoryview(buffer)[:size]))
            except BlockingIOError:
                pass  # poll reports the rest of the batch again
            except ConnectionError:
                self._read_carefully(fd, b"")
            self._read_bytes += total
            now = clock()
            log.end_batch(now)

    def _read_carefully(self, fd: int, data: bytes) -> None:
        """Handles a read that may hold a head, part of an event or an end; empty: connection closed."""
        if fd not in self._replies:
            self._reconnect(fd)  # the server closed an idle connection, or sent data on it
            return
        request, reply = self._replies[fd]
        if data:
            events = reply.feed(data)
            self._log.entries.append(fd)
            self._log.counts.append(events)
        else:
            reply.close()
        if reply.ended:
            self._finish(fd, request, reply)
        elif reply.in_stream:
            self._careful.discard(fd)
        else:
            self._careful.add(fd)

    def _finish(self, fd: int, request: int, reply: ReplyCounter) -> None:
        del self._replies[fd]
        self._careful.add(fd)
        if reply.error is not None:
            self._errors.append(reply.error)
            self._log.failed.append(request)
        if reply.error is None and reply.reusable:
            self._idle.append(fd)
        else:
            self._reconnect(fd)
        self._start_next()

    def _start_next(self) -> None:
        """Sends the next request of the round, if any, on the connection that has been idle longest."""
        number = len(self._log.starts)
        if number == self._plan.requests:
            return
        fd = self._idle.popleft()
        request = self._requests[number % len(self._requests)]
        self._replies[fd] = number, ReplyCounter()
        self._log.start(fd, time.perf_counter())
        try:
            sent = self._sockets[fd].send(request)
        except BlockingIOError:
            sent = 0
        except ConnectionError:
            return  # the next read fails as well
        if sent < len(request):
            self._unsent[fd] = memoryview(request)[sent:]
            self._poller.modify(fd, select.POLLIN | select.POLLOUT)

    def _handle_unusual(self, fd: int, mask: int) -> None:
        """Handles events other than POLLIN: sends the rest of a request, or reads a broken connection."""
        if mask & select.POLLOUT:
            rest = self._unsent[fd]
            rest = rest[self._sockets[fd].send(rest) :]
            self._unsent[fd] = rest
            if not rest:
                del self._unsent[fd]
                self._poller.modify(fd, select.POLLIN)
        if mask & ~select.POLLOUT:
            size = self._receive[fd](self._buffer)
            self._read_bytes += size
            self._read_carefully(fd, bytes(memoryview(self._buffer)[:size]))

    def _late(self) -> str:
        started, running = len(self._log.starts), len(self._replies)
        return (
            f"time is over with {started - running} of {self._plan.requests} requests of the round finished "
            f"({len(self._errors)} of them with an error) and {running} in flight"
        )

    # -- connections

    def _connect(self) -> None:
        address = self._plan.host, self._plan.port
        try:
            connection = socket.create_connection(address, timeout=10)
        except OSError as error:
            raise LoadError(f"cannot connect to {address[0]}:{address[1]}: {error}") from None
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd = connection.fileno()
        self._sockets[fd] = connection
        self._receive[fd] = connection.recv_into
        self._careful.add(fd)
        self._idle.append(fd)
        self._poller.register(fd, select.POLLIN)

    def _reconnect(self, fd: int) -> None:
        self._poller.unregister(fd)
        self._unsent.pop(fd, None)
        if fd in self._idle:
            self._idle.remove(fd)
        self._sockets.pop(fd).close()
        self._connect()

    def _renew_idle(self) -> None:
        """Reopens connections that the server has closed since the last round."""
        left = len(self._sockets)
        while left > 0 and (ready := self._wait(0)):
            for fd, _ in ready:
                self._reconnect(fd)
            left -= len(ready)


def request_bytes(plan: LoadPlan, body: bytes) -> bytes:
    """One HTTP request, with its head."""
    key = f"Authorization: Bearer {plan.api_key}\r\n" if plan.api_key else ""
    head = (
        f"POST {plan.path} HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _poller(poll: bool) -> tuple[select.epoll | select.poll, Callable[[float], list[tuple[int, int]]]]:
    """The poll object, and a function that waits at most so many seconds for ready connections."""
    if sys.platform == "linux" and not poll:
        epoll = select.epoll()
        return epoll, lambda seconds: epoll.poll(seconds, BATCH)
    poller = select.poll()
    return poller, lambda seconds: poller.poll(seconds * 1000)


def _allow_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise LoadError(f"{count} descriptors are needed, the limit (ulimit -Hn) is {hard}")
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def main() -> None:
    """Entry point of the process."""

    def answer(value: LoadMessage) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
        sys.stdout.buffer.flush()

    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=LoadPlan)
    client = LoadClient(plan)
    try:
        _allow_descriptors(plan.connections + SPARE_DESCRIPTORS)
        client.open()
        answer(LoadReady())
        gc.freeze()
        gc.disable()  # a collection would count as latency
        for line in sys.stdin.buffer:
            answer(client.run(msgspec.json.decode(line, type=RoundOrder)))
    except LoadError as error:
        answer(LoadFailure(str(error)))
    finally:
        client.close()


if __name__ == "__main__":
    main()
