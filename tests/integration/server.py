"""A real `penstock serve`, started and ended by a test."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from tests.launcher import COMMAND, start

# Making one takes longer than most requests, and every client of httpx makes its own.
TLS = ssl.create_default_context()
START_S = 90.0
END_S = 60.0
_READY = re.compile(rb'^ready in|"message": "ready"', re.MULTILINE)


class Server:
    """The process tree of one `penstock serve`, with its log. Use it as a context."""

    def __init__(
        self,
        *arguments: str,
        directory: Path,
        environ: Mapping[str, str] | None = None,
        start_s: float = START_S,
        within: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        """``within`` is a command that runs another one, such as one of another network namespace;
        ``python``: the server's interpreter, where the test's own environment has no PyTorch."""
        self.log_path = directory / "serve.log"
        self._start_s = start_s
        self._listens = "--headless" not in arguments
        tcp = ("--port", "0", "--allow-loopback-admin")
        listening = tcp if self._listens and "--uds" not in arguments else ()
        options = {} if environ is None else {"env": dict(environ)}
        command = (*within, python, *COMMAND[1:])
        self.process = start("serve", *listening, *arguments, command=command, **options)
        assert self.process.stdout is not None
        self._output = self.process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._log = b""
        self._reading = threading.Lock()
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._children: list[psutil.Process] = []
        self.url = ""

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while self._take_written():
                if not self._ready.is_set() and _READY.search(self._log):
                    self._ready.set()
                selector.select()
        self._ready.set()

    def _take_written(self) -> bool:
        """Append what the server has written until now to the log; whether there may be more."""
        with self._reading:
            if self._output.closed:
                return False
            with contextlib.suppress(BlockingIOError):
                while data := os.read(self._output.fileno(), 1 << 16):
                    self._log += data
                return False
        return True

    @property
    def log(self) -> str:
        """Its whole lines. What was written before a reply came is there, however busy this process is."""
        self._take_written()
        return self._log[: self._log.rfind(b"\n") + 1].decode()

    def __enter__(self) -> Self:
        started = self._ready.wait(self._start_s)
        match = re.search(r"https?://(127\.0\.0\.\d+:\d+|localhost)", self.log)
        if not started or (self._listens and match is None) or self.process.poll() is not None:
            self.end()
            raise AssertionError(f"the server did not start:\n{self.log}")
        self.url = match.group() if match else ""
        self._children = psutil.Process(self.process.pid).children(recursive=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.end()
        if error is not None:
            print(self.log)
        assert not left, f"processes outlived the server: {left}\n{self.log}"

    def end(self) -> list[psutil.Process]:
        """Stop everything; returns the processes that outlived the supervisor and had to be killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, alive = psutil.wait_procs(self._children, timeout=END_S)
        for process in alive:
            process.kill()
        self._reader.join(END_S)
        with self._reading:
            self._output.close()
        return alive

    # -- its processes

    def children(self, role: str) -> list[psutil.Process]:
        """Living processes of a role: api-server or engine."""
        found = [
            process
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if f"penstock: {role}" in _title(process)
        ]
        self._children += [process for process in found if process not in self._children]
        return found

    def kill(self, *processes: psutil.Process) -> None:
        """With SIGKILL; returns once they are gone, so that :meth:`children` are others."""
        for process in processes:
            process.kill()
        _, alive = psutil.wait_procs(processes, timeout=END_S)
        assert not alive

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples, those with these labels."""
        return total(self.metrics(), name, **labels)

    def metrics(self, **headers: str) -> str:
        """The text of /metrics. A server answers 503 while it loads, each of several hosts by itself."""
        replies: list[httpx.Response] = []

        def loaded() -> bool:
            replies.append(self.get("/metrics", **headers))
            return replies[-1].status_code != 503 or '"loading"' not in replies[-1].text

        wait_until(loaded, START_S, "the end of the loading")
        return replies[-1].raise_for_status().text

    # -- requests

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=30, verify=TLS)

    def post(self, path: str, body: dict[str, Any], timeout: float = 30.0, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=timeout, verify=TLS)

    def complete(self, prompt: Any = "hello", **options: Any) -> dict[str, Any]:
        reply = self.post("/v1/completions", {"prompt": prompt, **options})
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        return body

    def stream(self, prompt: Any = "hello", **options: Any) -> list[str]:
        """The data of all events of a streamed completion."""
        reply = self.post("/v1/completions", {"prompt": prompt, "stream": True, **options})
        assert reply.status_code == 200, reply.text
        return data_of(reply.text)


def _title(process: psutil.Process) -> str:
    """Nothing for one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a ZombieProcess is one, too
        return ""


@contextlib.contextmanager
def client_of_each(
    server: Server, api_servers: int, wait_s: float, headers: Mapping[str, str] | None = None
) -> Iterator[list[httpx.Client]]:
    """One connection to each API server, in the order of their names. ``headers``: an administrator's."""
    with contextlib.ExitStack() as stack:
        found: dict[str, httpx.Client] = {}

        def one_more() -> bool:
            client = stack.enter_context(
                httpx.Client(base_url=server.url, headers=headers, timeout=wait_s, verify=TLS)
            )
            processes = client.get("/debug/gc").raise_for_status().json()["processes"]
            [name] = [process for process in processes if process.startswith("api-server")]
            found.setdefault(name, client)
            return len(found) == api_servers

        wait_until(one_more, wait_s, "a connection to each API server")
        yield [found[name] for name in sorted(found)]


def total(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples in an exposition, those with these labels."""
    samples = re.findall(rf"^{re.escape(name)}({{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    values = [float(value) for given, value in samples if all(label in given for label in wanted)]
    assert values, f"no metric {name} {wanted}"
    return sum(values)


def data_of(text: str) -> list[str]:
    """The data of the events of an event stream."""
    assert text.endswith("\n\n"), "the stream ends within an event"
    return [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]


def wait_until(condition: Any, seconds: float, what: str) -> None:
    """Poll a condition of another process, for which there is nothing to wait on."""
    done = threading.Event()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        done.wait(0.05)
    raise AssertionError(f"{what} did not happen within {seconds} s")


def all_up(server: Server, engines: int, api_servers: int) -> bool:
    """Whether every API server, one of which each new connection goes to, is connected to all engines."""
    return all(server.metric("penstock:engine_up") == engines for _ in range(2 * api_servers))


VLLM_START_S = 400.0
"""Two engines that import vLLM at the same time on two cores that others use, too."""


def in_vllm(model: Path, *options: str, own: Sequence[str] = ()) -> list[str]:
    """Arguments for vLLM's engine on the model of the recorded replies; ``own``: vLLM's arguments."""
    common = ("--served-model-name", "tiny-llama", "--dtype", "float32", "--max-model-len", "2048")
    small = ("--max-num-seqs", "64", "--kv-cache-memory", "128Mi")
    own = ("--enforce-eager", *own)
    return [str(model), "--engine", "vllm", *common, *small, *options, "--", *own]


SYNTHETIC: Sequence[str] = ("--engine", "synthetic", "--synthetic-step-ms", "2", "--served-model-name", "m")
