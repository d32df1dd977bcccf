"""One server with two engines that follow a script, and coding agents as npm has them.

``make test-agents`` installs the agents and runs these tests. The agents get
a home of their own and no address but the server's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.agents import claude_code, codex, gemini_cli, opencode, qwen_code
from tests.gateway.processes import gateway
from tests.integration.server import Server, total, wait_until

BIN = Path(__file__).parent / "node_modules" / ".bin"
CONFIG = "[main]\nspeed = 3\nname = pump\n"
RELOAD = Path(__file__).parent / "replace_api_servers.py"
AGENTS = {
    "codex": codex,
    "claude": claude_code,
    "opencode": opencode,
    "qwen": qwen_code,
    "gemini": gemini_cli,
}
TRANSLATED = ["codex", "claude", "opencode", "qwen"]
"""Those whose API a gateway translates; their conversations are compacted in the long task."""
TASK_S = 300.0
KEY = "agents-key"
ALIAS = "claude-*=penstock-demo"
"""Claude Code asks for a model of Anthropic's unless told otherwise."""
LONG_REPORT = " ".join(f"word{number}" for number in range(60)) + "."


def metric(server: Server, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    return total(server.metrics(authorization=f"Bearer {KEY}"), name, **labels)


@dataclass(frozen=True)
class Agent:
    """A coding agent in a folder of its own."""

    name: str
    server: Server
    folder: Path
    environ: dict[str, str]

    def run(self, task: str, *options: str, after_result: Callable[[], None] = lambda: None) -> str:
        """Does a task; returns the agent's report. ``after_result``: called at the first result of a tool."""
        command = [str(BIN / self.name), *AGENTS[self.name].ARGUMENTS, *options, f"Please do {task}."]
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            limit = threading.Timer(TASK_S, process.kill)
            limit.start()
            try:
                assert process.stdout is not None
                output, has_result = "", False
                for line in process.stdout:
                    output += line
                    if not has_result and AGENTS[self.name].RESULT in line:
                        has_result = True
                        after_result()
                process.wait()
            finally:
                limit.cancel()
                process.kill()
        assert process.returncode == 0, output
        assert "penstock:unknown_request_fields_total{" not in self.server.metrics(
            authorization=f"Bearer {KEY}"
        )
        events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return AGENTS[self.name].report_of(events)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the agents' folders."""
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="session")
def server(root: Path) -> Iterator[Server]:
    reload = f"{sys.executable} {RELOAD} {root / 'supervisor.pid'}"
    rules = [
        rule
        for name, agent in AGENTS.items()
        for rule in agent.rules(root / name, reload=reload, long_report=LONG_REPORT)
    ]
    script = root / "script.json"
    script.write_text(json.dumps({"rules": rules}))
    scripted = ("--engine", "synthetic", "--synthetic-script", str(script), "--synthetic-step-ms", "2")
    model = ("--max-model-len", "200000", "--reasoning-parser", "think", "--model-alias", ALIAS)
    sees = ("--synthetic-image-tokens", "64", "--media-workers", "1")
    options = (*scripted, *model, *sees, "--data-parallel-size", "2", "--api-key", KEY, "--access-log", "all")
    with Server(*options, directory=root) as running:
        (root / "supervisor.pid").write_text(str(running.process.pid))
        yield running


@pytest.fixture(scope="session")
def translating(server: Server, root: Path) -> Iterator[str]:
    """URL of a gateway for which the server speaks chat completions alone."""
    path = root / "endpoints.yaml"
    path.write_text(f"pools:\n- {{name: chat, endpoints: ['{server.url}'], apis: [chat]}}\n")
    with gateway(options=("--endpoints-file", str(path))) as front:
        refused = front.client.post("/v1/messages/count_tokens", json={"model": "m", "messages": []})
        assert "speak chat alone" in refused.text
        yield front.url


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest, server: Server, root: Path) -> Agent:
    return _agent(request.param, server, server.url, root)


@pytest.fixture(params=TRANSLATED)
def translated_agent(request: pytest.FixtureRequest, server: Server, translating: str, root: Path) -> Agent:
    """It reaches the server through that gateway."""
    return _agent(request.param, server, translating, root)


def _agent(name: str, server: Server, url: str, root: Path) -> Agent:
    folder, home = root / name, root / f"{name}-home"
    folder.mkdir(exist_ok=True)
    home.mkdir(exist_ok=True)
    (folder / "config.ini").write_text(CONFIG)
    plain = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
    environ = plain | {"HOME": str(home)} | AGENTS[name].environ(url, KEY, home)
    return Agent(name, server, folder, environ)


@pytest.fixture
def kill_busy_engine(server: Server) -> Callable[[], None]:
    """Kills the engine that runs the one request, when it has begun to stream its long report."""

    def tokens() -> float:
        return metric(server, "vllm:generation_tokens_total")

    def running(rank: int) -> float:
        return metric(server, "vllm:num_requests_running", engine=str(rank))

    def kill() -> None:
        before = tokens()
        wait_until(lambda: tokens() > before + 5, TASK_S, "a report that streams")
        rank = 0 if running(0) else 1
        title = f"penstock: engine {rank}"
        (engine,) = (each for each in server.children("engine") if title in " ".join(each.cmdline()))
        engine.kill()
        psutil.wait_procs([engine], timeout=TASK_S)

    return kill
