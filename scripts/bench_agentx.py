"""Measure front ends under the AgentX scenario of aiperf, by turns: conversations of agents with subagents.

    python -m scripts.bench_agentx --aiperf PYTHON [--vllm PYTHON] [--turns 2] [--seconds 60] [--sessions 8]

``PYTHON``: interpreters of environments with aiperf and with vLLM's CPU build. Penstock runs with its
synthetic engine, vLLM's Python server with :mod:`penstock.bench.clock.engine`, which makes tokens on a clock
as well. Prints a row per turn. The traces that AgentX's own results are made of are large and not in its
package: these are made here, with the same shape (43 turns of growing prompts, most of them cached, and two
subagents), so the figures compare front ends in one run and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from penstock.bench.process_usage import cpu_time, pids_of_gateway, pids_of_supervisor
from penstock.bench.server_process import ServerProcess
from penstock.bench.tables import format_table
from penstock.supervisor.startup.model_resolution import DEMO_DIR

MODEL = "penstock-demo"
MAX_MODEL_LEN = 262_144
STEP_MS = 10.0
START_S = 180.0
EXTRA_S = 240.0
"""Time that aiperf may take beside the measured seconds: it makes the texts of all prompts first."""
BLOCK = 64
"""Tokens of a block of the traces."""
TURNS = 43
LONGEST = 170_000
"""Tokens of a prompt after which a conversation ends."""
REVISION = "0" * 40


class FrontEnd(NamedTuple):
    """A server that runs."""

    url: str
    processes: tuple[int, ...]
    """Ids of those whose CPU time is counted: all but the engine's."""


# -- traces


def write_traces(folder: Path, sessions: int) -> None:
    """One file per conversation, as aiperf's loader ``weka_trace`` reads them."""
    folder.mkdir()
    for number in range(sessions):
        trace = {
            "id": f"session-{number}",
            "models": [MODEL],
            "block_size": BLOCK,
            "hash_id_scope": "local",
            "tool_tokens": 8000,
            "system_tokens": 4000,
            "requests": _conversation(random.Random(number)),
        }
        (folder / f"session-{number}.json").write_text(json.dumps(trace))


def _conversation(rng: random.Random) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = []
    length, at_s = 24_000, 0.0
    for turn in range(TURNS):
        output = max(20, int(rng.lognormvariate(6.1, 0.8)))
        requests.append(_request(at_s, length, output, first_block=0))
        if turn in (5, 20):
            requests.append(_subagent(rng, at_s + 2, number=turn))
            at_s += 15
        length += output + int(rng.lognormvariate(7.2, 0.8))
        at_s += 3
        if length > LONGEST:
            break
    return requests


def _request(at_s: float, length: int, output: int, first_block: int) -> dict[str, Any]:
    blocks = range(first_block + 1, first_block + 1 + length // BLOCK)
    return {"t": at_s, "type": "s", "model": MODEL, "in": length, "out": output, "hash_ids": [*blocks]}


def _subagent(rng: random.Random, at_s: float, number: int) -> dict[str, Any]:
    requests, length = [], 8000
    for turn in range(6):
        output = int(rng.lognormvariate(5, 0.5))
        requests.append(_request(at_s + 1 + 2 * turn, length, output, first_block=1_000_000 * (number + 1)))
        length += output + 600
    return {
        "t": at_s,
        "type": "subagent",
        "agent_id": f"agent_{number}",
        "subagent_type": "Explore",
        "status": "completed",
        "duration_ms": 12_000,
        "requests": requests,
        "models": [MODEL],
    }


# -- servers


@contextlib.contextmanager
def penstock() -> Iterator[FrontEnd]:
    options = ("--synthetic-step-ms", str(STEP_MS), "--max-model-len", str(MAX_MODEL_LEN), "--port", "0")
    with ServerProcess(["serve", "--engine", "synthetic", *options], START_S) as server:
        yield FrontEnd(server.url, (server.pid, *pids_of_supervisor(server.pid).api_servers))


@contextlib.contextmanager
def vllm(python: str) -> Iterator[FrontEnd]:
    """vLLM's Python API server, its engine elsewhere."""
    port, engines = _free_port(), _free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_DIR)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--disable-uvicorn-access-log"]
    command += ["--data-parallel-size", "1", "--data-parallel-size-local", "0"]
    command += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(engines)]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    engine = [sys.executable, "-m", "penstock.bench.clock.engine", "127.0.0.1", str(engines)]
    engine += ["--step-ms", str(STEP_MS), "--max-model-len", str(MAX_MODEL_LEN)]
    engine += ["--vocab-size", str(json.loads((DEMO_DIR / "config.json").read_text())["vocab_size"])]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_quiet(command, os.environ | offline))
        stack.callback(server.terminate)
        clock = stack.enter_context(_quiet(engine))
        stack.callback(clock.kill)
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, server)
        yield FrontEnd(url, pids_of_gateway(server.pid).api_servers)


def _quiet(command: list[str], environ: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"{url} is not ready (exit code {process.poll()})")
        time.sleep(0.2)


# -- load


def run_aiperf(python: str, url: str, work: Path, seconds: int, sessions: int) -> dict[str, Any]:
    """aiperf's report of one run; ends the program if aiperf fails."""
    artifacts = work / "artifacts"
    shutil.rmtree(artifacts, ignore_errors=True)
    command = [str(Path(python).with_name("aiperf")), "profile", "--url", url, "--model", MODEL]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", "penstock/demo"]
    command += ["--scenario", "inferencex-agentx-mvp", "--unsafe-override"]  # it asks for 15 minutes at least
    command += ["--input-file", str(work / "traces"), "--custom-dataset-type", "weka_trace"]
    command += ["--concurrency", str(sessions), "--benchmark-duration", str(seconds)]
    command += ["--ui", "none", "--output-artifact-dir", str(artifacts)]
    environ = os.environ | {"HF_HOME": str(work / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=seconds + EXTRA_S, check=False
    )
    report = artifacts / "profile_export_aiperf.json"
    if done.returncode or not report.exists():
        raise SystemExit(f"aiperf failed ({done.returncode}):\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return dict(json.loads(report.read_text()))


def _prepare(work: Path, sessions: int) -> None:
    """Traces, and the demo model's tokenizer where aiperf looks for one."""
    write_traces(work / "traces", sessions)
    model = work / "hub" / "hub" / "models--penstock--demo"
    snapshot = model / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_DIR / name, snapshot)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)


def _row(name: str, report: dict[str, Any], cpu_s: float) -> list[str]:
    requests, tokens = report["request_count"]["avg"], report["total_output_tokens"]["avg"]
    first, between = report["time_to_first_token"], report["inter_token_latency"]
    return [
        name,
        f"{requests:.0f}",
        f"{report['request_error_rate']['avg']:.1f}",
        f"{cpu_s / requests * 1e3:.1f}",
        f"{cpu_s / tokens * 1e6:.0f}",
        f"{first['p50']:.0f} / {first['p99']:.0f}",
        f"{between['p50']:.1f} / {between['p99']:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Front ends under aiperf's AgentX scenario, by turns.")
    parser.add_argument("--aiperf", required=True, help="Python of an environment with aiperf.")
    parser.add_argument("--vllm", help="Python of an environment with vLLM's CPU build.")
    parser.add_argument("--turns", type=int, default=2, help="How often each is measured (default: 2).")
    parser.add_argument("--seconds", type=int, default=60, help="Measured seconds of a turn (default: 60).")
    parser.add_argument("--sessions", type=int, default=8, help="Conversations at once (default: 8).")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _prepare(work, given.sessions)
        for _ in range(given.turns):
            servers = {"penstock": penstock()} | ({"vllm": vllm(given.vllm)} if given.vllm else {})
            for name, server in servers.items():
                with server as front:
                    before = cpu_time(front.processes)
                    report = run_aiperf(given.aiperf, front.url, work, given.seconds, given.sessions)
                    used = cpu_time(front.processes) - before
                    rows.append(_row(name, report, used.total))
                print(*rows[-1], sep="  ", flush=True)
    heads = ["front end", "requests", "errors, %", "CPU ms/request", "CPU µs/token"]
    heads += ["TTFT p50 / p99, ms", "ITL p50 / p99, ms"]
    print("\n".join(format_table([heads, *rows])))


if __name__ == "__main__":
    main()
