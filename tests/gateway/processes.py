"""A real `penstock gateway`, and model servers that behave as a test wants."""

from __future__ import annotations

import contextlib
import fcntl
import re
import socket
import socketserver
import ssl
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import httpx
import msgspec
import psutil

from tests.launcher import COMMAND, Process, start

WAIT_S = 90.0


@dataclass
class Call:
    """One request to a model server."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: socket.socket
    gone: threading.Event
    """Set when the gateway has closed the connection under a behaviour that waits for it."""

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def stream(self, *events: str, end: bool = True) -> None:
        """Head and events of a stream, each event a chunk; ``end`` ends the body."""
        self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in events:
            self.chunk(f"data: {event}\n\n".encode())
        if end:
            self.send(b"0\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    def reset(self) -> None:
        """RST, not FIN."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.connection.close()

    def wait_until_gone(self) -> None:
        """Until the gateway has closed the connection."""
        with contextlib.suppress(OSError):
            while self.connection.recv(4096):
                pass
        self.gone.set()


Behaviour = Callable[[Call], None]


class Upstream:
    """A model server with one behaviour, which may be changed."""

    def __init__(self, behaviour: Behaviour, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.behaviour = behaviour
        self.seen: list[Call] = []
        """Every request, also those that the gateway makes for itself."""
        self.metrics = b"vllm:num_requests_waiting 0\n"
        self.on_metrics: Behaviour = lambda call: call.reply(200, self.metrics, "text/plain")
        self.on_models: Behaviour = lambda call: call.reply(404, b"{}")
        self.calls: list[Call] = []
        owner = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if tls is not None:
                    try:
                        self.request = tls.wrap_socket(self.request, server_side=True)
                    except OSError:
                        return
                while (call := _read_call(self.request)) is not None:
                    owner.seen.append(call)
                    if call.method == "PRI":  # the beginning of HTTP/2
                        call.reply(400, b"{}")
                        return
                    if call.path == "/metrics":
                        owner.on_metrics(call)
                        continue
                    if call.path == "/v1/models" and "x-request-id" not in call.headers:  # no client's
                        owner.on_models(call)
                        continue
                    owner.calls.append(call)
                    with contextlib.suppress(OSError):
                        owner.behaviour(call)
                    if self.request.fileno() < 0:
                        return

            def finish(self) -> None:
                if tls is not None:
                    self.request.close()

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """The gateway may leave at any time."""

        self._server = Server(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _read_call(connection: socket.socket) -> Call | None:
    data = b""
    while b"\r\n\r\n" not in data:
        try:
            more = connection.recv(65536)
        except OSError:
            return None
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _read_chunks(connection, body)
    while len(body) < int(headers.get("content-length", 0)):
        body += connection.recv(65536)
    return Call(method, path, headers, body, connection, threading.Event())


def _read_chunks(connection: socket.socket, data: bytes) -> bytes:
    while not data.endswith(b"\r\n0\r\n\r\n"):
        data += connection.recv(65536)
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        if not (count := int(size, 16)):
            return body
        body, data = body + data[:count], data[count + 2 :]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def three_in_a_row(goes_well: Callable[[], bool]) -> None:
    """Requests that go well, so that failures of other tests do not add up to an open breaker; on a loaded
    machine one of them may fail."""
    in_a_row = 0

    def done() -> bool:
        nonlocal in_a_row
        in_a_row = in_a_row + 1 if goes_well() else 0
        return in_a_row == 3

    eventually(done)


@dataclass
class Gateway:
    """A gateway process and a client for it."""

    process: Process | subprocess.Popen[str]
    url: str
    client: httpx.Client
    lines: list[str] = field(default_factory=list)

    def complete(self, *, stream: bool = True, **fields: Any) -> httpx.Response:
        body = {"model": "m", "prompt": "p", "stream": stream, **fields}
        return self.client.post("/v1/completions", json=body)

    @contextlib.contextmanager
    def left(self, **fields: Any) -> Iterator[None]:
        """A streamed completion whose client leaves at the end of the context."""
        body = msgspec.json.encode({"model": "m", "prompt": "p", "stream": True, **fields})
        url = httpx.URL(self.url)
        with socket.create_connection((url.host, url.port or 80), timeout=WAIT_S) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            yield

    @property
    def workers(self) -> list[psutil.Process]:
        """The worker processes, in the order of their start."""
        children = psutil.Process(self.process.pid).children()
        workers = [each for each in children if each not in self.templates]
        return sorted(workers, key=lambda each: (each.create_time(), each.pid))

    @property
    def templates(self) -> list[psutil.Process]:
        """The process of which several workers are forks, if there is one."""
        children = psutil.Process(self.process.pid).children()
        return [each for each in children if each.cmdline()[:1] == ["penstock: template"]]

    def counts(self, name: str = "request_total") -> dict[str, float]:
        """Of one counter: label values, joined by commas, to value; models, APIs and pools are left out."""
        ignored = ("model", "target_model", "api", "pool")
        text = self.client.get("/metrics").text
        found = {}
        for labels, value in re.findall(rf"^penstock_gateway_{name}(?:{{(.*)}})? (\S+)$", text, re.M):
            pairs = re.findall(r'(\w+)="([^"]*)"', labels)
            key = ",".join(value for label, value in pairs if label not in ignored)
            found[key] = found.get(key, 0.0) + float(value)
        return found


@contextlib.contextmanager
def gateway(
    *upstreams: Upstream | str,
    options: tuple[str, ...] = (),
    python: str = sys.executable,
    terminal: int | None = None,
    verify: ssl.SSLContext | bool = True,
) -> Iterator[Gateway]:
    """A gateway in front of ``upstreams``. It reads no loads unless ``options`` say so: a loaded machine must
    not take an endpoint out. ``terminal``: descriptor of what becomes its controlling terminal. ``verify``:
    how its client verifies one with TLS."""
    urls = [each if isinstance(each, str) else each.url for each in upstreams]
    arguments = ["--port", "0", "--access-log", "all", *(["--endpoints", *urls] if urls else []), *options]
    if "--scrape-interval" not in options:
        arguments += ["--scrape-interval", "0"]
    controlled: dict[str, Any] = {}
    if terminal is not None:
        controls = partial(fcntl.ioctl, terminal, termios.TIOCSCTTY, 0)
        controlled = {"pass_fds": [terminal], "preexec_fn": controls}
    process = start("gateway", *arguments, command=(python, *COMMAND[1:]), **controlled)
    assert process.stdout is not None
    lines = []
    url = ""
    for line in process.stdout:
        lines.append(line)
        if match := re.match(r" +URL +(https?://\S+)/v1", line):
            url = match.group(1)
        if line.startswith("ready in"):
            break
    reader = threading.Thread(target=lambda stream: lines.extend(stream), args=(process.stdout,))
    reader.start()
    try:
        assert url, "".join(lines)
        with httpx.Client(base_url=url, timeout=WAIT_S, verify=verify) as client:
            yield Gateway(process, url, client, lines)
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        process.stdout.close()
        print("".join(lines))


def refused_by(front: Gateway, code: str) -> httpx.Response:
    """Asks until the gateway refuses with ``code``: between refusals it tries again how its endpoints are."""
    replies = []

    def refused() -> bool:
        replies.append(front.complete())
        return replies[-1].status_code != 200 and replies[-1].json()["error"].get("code") == code

    eventually(refused)
    return replies[-1]


_closed: list[socket.socket] = []
"""Bound sockets that do not listen: nothing else can get their ports, and connections to them are refused."""


def closed_port() -> str:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    _closed.append(sock)
    return f"http://127.0.0.1:{sock.getsockname()[1]}"


def outcome_of(front: Gateway, act: Callable[[], object]) -> str:
    """The one outcome that is counted while ``act`` runs and the request ends."""
    before = front.counts()
    act()
    after = before
    deadline = time.monotonic() + WAIT_S
    while sum(after.values()) == sum(before.values()):
        assert time.monotonic() < deadline, "no outcome was counted"
        after = front.counts()
    [(outcome, more)] = [
        (key, after[key] - before.get(key, 0.0)) for key in after if after[key] != before.get(key, 0.0)
    ]
    assert more == 1
    assert front.counts("requests_in_flight") == {"": 0.0}
    return outcome
