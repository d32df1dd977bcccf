"""Measure this tree beside another commit: CPU time of the API server, by turns, for nine kinds of requests.

    python -m scripts.bench_against REF [--only short,text] [--turns 5] [--quick]

The commit is checked out beside this tree, with an environment of its own if it needs other packages. Both
servers of a workload run at the same time and are loaded by turns, by this tree's load client: what the
machine does besides falls on both. Prints one ratio per workload, this tree's CPU time per request in parts
of the commit's, and a line for docs/log.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from penstock.bench.deadline import Deadline
from penstock.bench.process_usage import cpu_time, pids_of_supervisor
from penstock.bench.request_bodies import BenchmarkBodies
from penstock.bench.server_process import ServerProcess, serve_arguments
from penstock.bench.server_under_load import MeasuredServer, ServerUnderLoad
from penstock.config.bench import BenchHostConfig

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0
WHOLE_CLIENTS = 16
"""Connections of the workload of whole replies, each with a thread."""


@dataclass(frozen=True)
class Workload:
    """What is asked of both servers. ``requests``: of one turn."""

    name: str
    text: str
    options: dict[str, object]
    requests: int
    whole: bool = False
    """Whether its replies are not streamed."""

    def config(self, *, quick: bool) -> BenchHostConfig:
        options = {"step_ms": 0.0, "timeout": 3600.0, **self.options}
        return BenchHostConfig(requests=self._requests(quick=quick), **options)  # type: ignore[arg-type]

    def _requests(self, *, quick: bool) -> int:
        return max(1, self.requests // 8) if quick else self.requests


SHORT = {"endpoint": "chat", "streams": 16, "tokens": 1}
WORKLOADS = [
    Workload("short", "short requests", {**SHORT, "prompt_tokens": 8}, 2000),
    Workload("text", "texts of 2,000 tokens", {**SHORT, "prompt_tokens": 2000}, 500),
    Workload(
        "ids",
        "2,000 token ids",
        {"streams": 16, "tokens": 1, "prompt_tokens": 2000, "prompt_kind": "ids"},
        1000,
    ),
    Workload("whole", "whole replies", {**SHORT, "tokens": 128}, 500, whole=True),
    Workload("streams-1024", "1,024 streams", {"streams": 1024, "tokens": 128, "step_ms": 15.0}, 1024),
    Workload("streams-64", "64 streams", {"streams": 64, "tokens": 512, "step_ms": 5.0}, 64),
    Workload(
        "interval-1024",
        "1,024 streams, interval 10",
        {"streams": 1024, "tokens": 256, "step_ms": 15.0, "stream_interval": "10"},
        1024,
    ),
    Workload(
        "interval-64",
        "64 streams, interval 10",
        {"streams": 64, "tokens": 1024, "step_ms": 2.0, "stream_interval": "10"},
        64,
    ),
    Workload(
        "http2",
        "HTTP/2, 1,024 x 128",
        {"streams": 1024, "tokens": 128, "step_ms": 15.0, "http2": True},
        1024,
    ),
]


@contextlib.contextmanager
def checked_out(ref: str) -> Iterator[Path]:
    """A worktree of a commit, for as long as it is measured."""
    with tempfile.TemporaryDirectory(prefix="penstock-against-") as directory:
        tree = Path(directory) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), ref)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def python_of(tree: Path) -> str:
    """The interpreter with what the tree needs: this one's, if both need the same packages."""
    if _packages(tree) == _packages(ROOT):
        return sys.executable
    print("the commit needs other packages, which are installed", flush=True)
    environment = tree / ".venv"
    subprocess.run(
        [sys.executable, "scripts/install.py", "--torch-index", "auto", str(environment), "torch"],
        cwd=tree,
        check=True,
    )
    return str(environment / "bin" / "python")


@contextlib.contextmanager
def loaded(workload: Workload, tree: Path, python: str, *, quick: bool) -> Iterator[Callable[[], float]]:
    """What loads a server of ``tree`` for a turn, and tells its CPU seconds per request."""
    config = workload.config(quick=quick)
    deadline = Deadline(config.timeout)
    with contextlib.ExitStack() as stack:
        arguments = serve_arguments(config)
        server = stack.enter_context(ServerProcess(arguments, START_S, python=python, tree=tree))
        pids = pids_of_supervisor(server.pid)
        if workload.whole:
            measure = stack.enter_context(whole_replies(config, server.url))

            def turn() -> float:
                before = cpu_time(pids.api_servers).total
                measure()
                return (cpu_time(pids.api_servers).total - before) / config.requests_per_round

        else:
            load = ServerUnderLoad(config, MeasuredServer(server.url, pids), stack, deadline)

            def turn() -> float:
                result = load.run(deadline.left("a turn"), keep=False)
                if result.load.errors:
                    raise SystemExit(f"{workload.name}: {result.load.error_samples[0]}")
                return result.api_server_cpu_s.total / config.requests_per_round

        yield turn


@contextlib.contextmanager
def whole_replies(
    config: BenchHostConfig, url: str, behind: str | None = None
) -> Iterator[Callable[[], object]]:
    """Sends a turn's requests for replies that are not streamed, over connections that stay open. ``behind``:
    as in :class:`MeasuredServer`."""
    with httpx.Client(base_url=behind or url, trust_env=False, timeout=START_S) as client:
        requests = BenchmarkBodies(config, client)
        bodies = [body.replace('"stream":true', '"stream":false').encode() for body in requests.bodies()]
    parts, pool = urlsplit(url), ThreadPoolExecutor(WHOLE_CLIENTS)
    connections = [http.client.HTTPConnection(parts.hostname or "", parts.port) for _ in range(WHOLE_CLIENTS)]

    def send(number: int) -> None:
        connection = connections[number]
        for index in range(number, config.requests_per_round, WHOLE_CLIENTS):
            body = bodies[index % len(bodies)]
            connection.request("POST", requests.path, body, {"content-type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            if reply.status != 200:
                raise SystemExit(f"a whole reply has the status {reply.status}")

    try:
        yield lambda: deque(pool.map(send, range(WHOLE_CLIENTS)), maxlen=0)
    finally:
        pool.shutdown()
        for connection in connections:
            connection.close()


def ratios(here: Callable[[], float], there: Callable[[], float], turns: int) -> list[float]:
    """What a request costs here in parts of what it costs there, per turn; who begins changes."""
    here(), there()  # warm-up
    found = []
    for number in range(turns):
        if number % 2:
            ours = here()
            found.append(ours / there())
        else:
            theirs = there()
            found.append(here() / theirs)
    return found


def shown(found: list[float]) -> str:
    """A ratio with its spread."""
    return f"{statistics.median(found):.2f} ({min(found):.2f}–{max(found):.2f})"


def log_line(ref: str, results: dict[str, list[float]], turns: int) -> str:
    """The line for docs/log.md."""
    figures = ", ".join(f"{name} {shown(found)}" for name, found in results.items())
    today = datetime.date.today().isoformat()
    measured = f"`make bench-against REF={ref}`, {turns} turns, medians (least–greatest)"
    told = f"CPU of the API server per request: {figures} x."
    return f"| {today} | Against the pinned commit: {measured} | {told} | Measured |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", help="the commit to compare with")
    known = ", ".join(each.name for each in WORKLOADS)
    parser.add_argument("--only", default="", help=f"workloads, separated by commas, of {known}")
    parser.add_argument("--turns", type=int, default=5, help="turns per workload (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="an eighth of the requests, to see that it works"
    )
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name]
    if unknown := set(names) - {each.name for each in WORKLOADS}:
        parser.error(f"there are the workloads {known}, not {', '.join(sorted(unknown))}")
    results = dict[str, list[float]]()
    with checked_out(options.ref) as tree:
        python = python_of(tree)
        for workload in WORKLOADS:
            if names and workload.name not in names:
                continue
            with (
                loaded(workload, ROOT, sys.executable, quick=options.quick) as ours,
                loaded(workload, tree, python, quick=options.quick) as theirs,
            ):
                results[workload.text] = found = ratios(ours, theirs, options.turns)
            print(f"{workload.text:28} {shown(found)}", flush=True)
    print("\n" + log_line(options.ref, results, options.turns))
    return 0


def _packages(tree: Path) -> object:
    """What a tree needs installed."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    constraints = (tree / "constraints.txt").read_text()
    return project["dependencies"], project["optional-dependencies"], constraints


def _git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
