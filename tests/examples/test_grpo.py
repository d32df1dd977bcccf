"""The GRPO example trains the demo model on a server of two API servers and two engines."""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.server import Server

ROOT = Path(__file__).parents[2]
TRAINER = ROOT / "examples" / "grpo" / "train.py"
PAGE = ROOT / "docs" / "rl.md"
ENGINES = 2
FLEET = ("--api-server-count", "2", "--data-parallel-size", str(ENGINES))
SMALL = ("--threads", "1", "--dtype", "float32", "--kv-cache-memory", "64Mi")
STEPS = 9
MAX_LINES = 200


def test_the_trainer_is_short() -> None:
    assert len(TRAINER.read_text().splitlines()) <= MAX_LINES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(*FLEET, *SMALL, directory=tmp_path_factory.mktemp("grpo")) as running:
        yield running


def test_rewards_rise_and_every_step_samples_with_its_own_weights(server: Server, tmp_path: Path) -> None:
    output = tmp_path / "trained.safetensors"
    command = [sys.executable, str(TRAINER), "--url", server.url, "--output", str(output)]
    # It ends with an error if a token is of other weights than those of its step.
    # One thread: on a busy machine several wait for each other.
    trainer = subprocess.run(
        [*command, "--steps", str(STEPS)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert trainer.returncode == 0, f"{trainer.stdout}\n{trainer.stderr}\n{server.log}"
    told = trainer.stdout
    shared = Path(re.search(r"^weights in (\S+)", told, re.MULTILINE)[1])  # type: ignore[index]
    assert not shared.exists()

    rewards = [float(reward) for reward in re.findall(r"^step \d+  reward (\S+)", told, re.MULTILINE)]
    assert len(rewards) == STEPS
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, told
    differences = [float(nats) for nats in re.findall(r"logprobs differ by (\S+)", told)]
    assert len(differences) == STEPS
    assert max(differences) < 1e-3, told

    versions = server.get("/weight_version").json()
    last = f"{shared.name}-last"
    assert versions["weight_version"] == last
    assert [engine["weight_version"] for engine in versions["engines"]] == [last] * ENGINES
    checksums = server.get("/weights_checksum").json()
    assert checksums["equal"] is True
    set_to = re.findall(rf"weights is set to: version ({shared.name}\S+) from ", server.log)
    assert set_to == [f"{shared.name}-{step}" for step in [*range(STEPS), "last"]]
    for engine in range(ENGINES):
        assert server.metric("vllm:generation_tokens_total", engine=str(engine)) > 0
    assert output.stat().st_size > 0


def test_the_loop_of_the_page_runs(server: Server, tmp_path: Path) -> None:
    [loop] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = tmp_path / "loop.py"
    script.write_text(loop.replace("http://localhost:8000", server.url))
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    told = [line.split() for line in ended.stdout.splitlines()]
    assert [step for step, *_ in told] == [str(step) for step in range(3) for _ in range(8)]
    assert all(float(mean) < 0 for *_, mean in told)


def test_a_server_that_is_missing_or_refuses_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(url: str) -> str:
        options = ("--url", url, "--output", str(tmp_path / "output"), "--steps", "1")
        monkeypatch.setattr(sys, "argv", [str(TRAINER), *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(TRAINER), run_name="__main__")
        shared = Path(re.search(r"^weights in (\S+)", capsys.readouterr().out, re.MULTILINE)[1])  # type: ignore[index]
        assert not shared.exists()
        return str(ended.value.code)

    on_signal = signal.getsignal(signal.SIGTERM)
    try:
        with socket.socket() as bound:  # it does not listen
            bound.bind(("127.0.0.1", 0))
            missing = f"http://127.0.0.1:{bound.getsockname()[1]}"
            assert told(missing) == f"{missing}: [Errno 111] Connection refused"
        with Server("--engine", "synthetic", "--admin-api-key", "secret", directory=tmp_path) as server:
            refused = rf"{server.url}: the weights .*-0 were not taken: .*invalid_api_key"
            assert re.match(refused, told(server.url))
    finally:
        signal.signal(signal.SIGTERM, on_signal)
    assert not (tmp_path / "output").exists()


def test_what_is_not_of_the_trainers_weights_is_an_error(tmp_path: Path) -> None:
    with Server("--engine", "synthetic", "--admin-api-key", "secret", directory=tmp_path) as server:
        sampler = runpy.run_path(str(TRAINER))["Sampler"](server.url, tmp_path)
        try:
            with pytest.raises(RuntimeError, match=r"tokens of the weights step-3 are of {'default'}"):
                sampler.sample(2, 0, "step-3")
            with pytest.raises(RuntimeError, match=r"the weights step-3 were not taken: .*invalid_api_key"):
                sampler.update(torch.nn.Linear(2, 2), "step-3")
        finally:
            sampler.close()
