"""The load client: many streams over raw sockets, at the least possible CPU time.

Runs as ``python -m penstock.bench.load.client``, started by :mod:`penstock.bench.load.process`. Reads lines
of JSON from standard input, a LoadPlan and then a RoundOrder per round, and answers each with a line on
standard output. Exits when standard input is closed.

An event takes a few searches in bytes: JSON is not parsed, no object is created per event. See
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
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.bench.load.connection import Connection, Ended
from penstock.bench.load.http1 import Http1LoadConnection, request_bytes
from penstock.bench.load.http2 import Http2LoadConnection, Http2Requests
from penstock.bench.load.latency import Latency, ReadLog
from penstock.bench.load.messages import (
    LoadFailure,
    LoadMessage,
    LoadPlan,
    LoadReady,
    RoundOrder,
    RoundResult,
)
from penstock.bench.load.reply_counter import ERROR, EVENT, find_last
from penstock.bench.load.tls import RECORD_BYTES, SEALED_BYTES, TlsSession, client_context

WHOLE_EVENTS = b"}\n\n\r\n"
"""End of a read that holds only whole JSON events in whole chunks."""
BATCH = 64
"""Ready connections taken from the kernel at once, and requests started at once. Reads of a batch share a
timestamp, which limits its error."""
READ_BYTES = SEALED_BYTES + RECORD_BYTES
"""Maximum bytes of a read: more than a step of a thousand streams has."""
CONNECT_SECONDS = 10.0
SAMPLES = 5  # different errors in a result
SPARE_DESCRIPTORS = 64


class LoadError(Exception):
    """The server is unreachable, or did not finish in time."""


class LoadClient:
    """Runs the requests of a LoadPlan. ``poll``: use poll() even where epoll is available."""

    def __init__(self, plan: LoadPlan, *, poll: bool = False) -> None:
        self._plan = plan
        self._new_connection = connections_of(plan)
        self._tls = client_context(plan.authority, plan.alpn) if plan.authority else None
        self._poller, self._wait = _poller(poll)
        self._buffer = bytearray(READ_BYTES)
        self._kept: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []

        # -- per connection, by descriptor
        self._sockets: dict[int, socket.socket] = {}
        self._receive: dict[int, Callable[[bytearray], int]] = {}
        self._seal: dict[int, Callable[[bytes], bytes]] = {}  # with TLS
        self._connections: dict[int, Connection] = {}
        self._unsent: dict[int, memoryview] = {}
        # All but those whose next read most likely holds whole events.
        self._careful: set[int] = set()

        # -- places for requests: descriptors, the longest idle first
        self._idle: deque[int] = deque()

        # -- per round
        self._log = ReadLog()
        self._running = 0
        self._errors: list[str] = []
        self._read_bytes = self._reads = 0

    def open(self) -> None:
        """Open all connections. Raises LoadError."""
        descriptors = [self._connect() for _ in range(self._plan.connections)]
        places = max(connection.places for connection in self._connections.values())
        self._idle = deque(descriptors * places)  # requests go to the connections in turn

    def close(self) -> None:
        """Close all connections."""
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()

    def run(self, order: RoundOrder) -> RoundResult:
        """Run one round. Raises LoadError when the server is unreachable or the time limit is exceeded."""
        self._read_between_rounds()
        log = self._log = ReadLog()
        self._errors = []
        self._read_bytes = self._reads = 0
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
            reads=self._reads,
            wall_s=wall,
            cpu_s=cpu,
            ttft_ms=ttft,
            itl_ms=itl,
            all_ttft_ms=all_ttft,
            all_itl_ms=all_itl,
        )

    # -- a round

    def _drive(self, deadline: float) -> None:
        """Start the requests of the round and read until all have finished."""
        log, careful, receive, wait = self._log, self._careful, self._receive, self._wait
        buffer, clock = self._buffer, time.perf_counter
        append_entry, append_count = log.entries.append, log.counts.append
        ends_with, find, count = buffer.endswith, buffer.find, buffer.count
        self._start_requests()
        now = clock()
        while self._running:
            if now > deadline:
                raise LoadError(self._late())
            total = reads = fd = 0
            try:
                for fd, mask in wait(deadline - now):
                    if mask != select.POLLIN:
                        self._handle_unusual(fd, mask)
                        continue
                    size = receive[fd](buffer)
                    total += size
                    reads += 1
                    # Fast path of nearly all events over HTTP/1.1.
                    whole = fd not in careful and ends_with(WHOLE_EVENTS, 0, size)
                    if whole and find(ERROR, 0, size) < 0 and find_last(buffer, 0, size) is None:
                        append_entry(fd)
                        append_count(count(EVENT, 0, size))
                    else:
                        self._take(fd, bytes(memoryview(buffer)[:size]))
            except BlockingIOError:
                pass  # poll reports the rest of the batch again
            except ConnectionError:
                self._take(fd, b"")
            self._read_bytes += total
            self._reads += reads
            now = clock()
            log.end_batch(now)

    def _take(self, fd: int, data: bytes) -> None:
        """Hand a read to its connection; empty: the server closed it. Starts requests in free places."""
        connection = self._connections[fd]
        ended = connection.feed(data, self._log) if data else connection.close()
        self._send(fd)
        for each in ended:
            self._finish(fd, each)
        if connection.failure is not None:
            self._replace(fd)
        elif connection.whole_events:
            self._careful.discard(fd)
        else:
            self._careful.add(fd)
        if ended:
            self._start_requests()

    def _finish(self, fd: int, ended: Ended) -> None:
        self._running -= 1
        if ended.error is not None:
            self._errors.append(ended.error)
            self._log.failed.append(ended.request)
        self._idle.append(fd)

    def _start_requests(self) -> None:
        """Send further requests of the round, each on the connection that has waited longest.

        Those of one turn share a write per connection, as in a proxy whose clients' requests come together.
        """
        log = self._log
        while left := self._to_start():
            written: dict[int, None] = {}
            for _ in range(min(left, BATCH)):
                fd = self._idle.popleft()
                self._running += 1
                number = self._connections[fd].start(len(log.starts))
                log.start(number, time.perf_counter())
                written[fd] = None
            for fd in written:
                self._send(fd)

    def _to_start(self) -> int:
        """Requests for which there are places now."""
        plan = self._plan
        return min(len(self._idle), plan.in_flight - self._running, plan.requests - len(self._log.starts))

    def _send(self, fd: int) -> None:
        """Send what the connection has to send; the rest when the kernel takes it."""
        data = self._connections[fd].take_output()
        if not data:
            return
        if fd in self._seal:
            data = self._seal[fd](data)
        if fd in self._unsent:
            self._unsent[fd] = memoryview(bytes(self._unsent[fd]) + data)
            return
        try:
            sent = self._sockets[fd].send(data)
        except BlockingIOError:
            sent = 0
        except ConnectionError:
            return  # the next read fails as well
        if sent < len(data):
            self._unsent[fd] = memoryview(data)[sent:]
            self._poller.modify(fd, select.POLLIN | select.POLLOUT)

    def _handle_unusual(self, fd: int, mask: int) -> None:
        """Handle events other than POLLIN: sends the rest of a request, or reads a broken connection."""
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
            self._take(fd, bytes(memoryview(self._buffer)[:size]))

    def _late(self) -> str:
        started, running = len(self._log.starts), self._running
        return (
            f"time is over with {started - running} of {self._plan.requests} requests of the round finished "
            f"({len(self._errors)} of them with an error) and {running} in flight"
        )

    # -- connections

    def _connect(self) -> int:
        """Open a connection, ready for requests. Returns its descriptor. Raises LoadError."""
        host, port = self._plan.host, self._plan.port
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
            fd = connection.fileno()
            self._sockets[fd] = connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._receive[fd] = connection.recv_into
            if self._tls is not None:
                session = TlsSession(self._tls, connection, host)
                if session.protocol != self._plan.alpn:
                    raise LoadError(f"{host}:{port} chose {session.protocol} by ALPN, not {self._plan.alpn}")
                self._receive[fd], self._seal[fd] = session.recv_into, session.seal
            self._connections[fd] = self._new_connection(fd)
            self._greet(fd)
        except OSError as error:
            raise LoadError(f"cannot connect to {host}:{port}: {error}") from None
        connection.setblocking(False)
        self._careful.add(fd)
        self._poller.register(fd, select.POLLIN)
        return fd

    def _greet(self, fd: int) -> None:
        """Exchanges what a protocol begins with. Raises LoadError and OSError."""
        connection = self._connections[fd]
        self._send(fd)
        while not connection.ready and connection.failure is None:
            try:
                size = self._receive[fd](self._buffer)
            except BlockingIOError:
                continue  # no whole record of TLS yet
            if not size:
                raise LoadError("the server closed the connection instead of sending SETTINGS of HTTP/2")
            connection.feed(bytes(memoryview(self._buffer)[:size]), self._log)
            self._send(fd)
        if connection.failure is not None:
            raise LoadError(connection.failure)

    def _replace(self, fd: int) -> None:
        """Open another connection for one that takes no requests, once its last one has ended."""
        connection = self._connections[fd]
        self._idle = deque(each for each in self._idle if each != fd)
        if connection.running:
            return
        self._poller.unregister(fd)
        self._unsent.pop(fd, None)
        self._seal.pop(fd, None)
        self._sockets.pop(fd).close()
        self._idle.extend([self._connect()] * connection.places)

    def _read_between_rounds(self) -> None:
        """Read what came since the last round: connections that the server has closed are replaced."""
        left = len(self._sockets)
        while left > 0 and (ready := self._wait(0)):
            for fd, _ in ready:
                try:
                    size = self._receive[fd](self._buffer)
                except BlockingIOError:
                    continue
                except ConnectionError:
                    size = 0
                self._take(fd, bytes(memoryview(self._buffer)[:size]))
            left -= len(ready)


def connections_of(plan: LoadPlan) -> Callable[[int], Connection]:
    """What makes a connection of the plan's protocol, given its descriptor."""
    bodies: Sequence[bytes] = [body.encode() for body in plan.bodies]
    if plan.http2:
        fields = Http2Requests(plan, bodies)
        return lambda fd: Http2LoadConnection(fields, plan.streams_per_connection)
    requests = [request_bytes(plan, body) for body in bodies]
    return lambda fd: Http1LoadConnection(requests, fd)


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
