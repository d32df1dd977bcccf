"""The two ladders of docs/architecture.md against what a server calls for one request, and in which order."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.integration.server import Server, wait_until

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "SIGRTMIN"), reason="needs real-time signals, as Linux has"
)

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
RECORDER = """
import json, os, signal, sys, time

FIRST = {}


def note(frame, event, argument):
    if event == "call" and frame.f_code not in FIRST:
        FIRST[frame.f_code] = time.monotonic()


def toggle(number, frame):
    path = os.path.join(os.environ["RECORDED_CALLS"], str(os.getpid()))
    if sys.getprofile() is None:
        open(path + ".begun", "w").close()
        sys.setprofile(note)
        return
    sys.setprofile(None)
    calls = [(code.co_filename, code.co_qualname, at) for code, at in FIRST.items()]
    with open(path + ".part", "w") as file:
        json.dump(calls, file)
    os.rename(path + ".part", path)


if any(word in " ".join(sys.orig_argv) for word in ("child_main", " serve ")):
    signal.signal(signal.SIGRTMIN + 3, toggle)
"""
"""Python runs it at the start of each process; forks have their template's handler. A signal begins a record,
another ends it."""
SIGNAL = getattr(signal, "SIGRTMIN", 0) + 3
"""One that no process of a server ignores."""


def ladder(title: str) -> list[str]:
    """Each ``file.py:name`` of the second column of a ladder."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")]
    return [step for row in rows for step in re.findall(r"`([\w/]+\.py:\w+)`", row)]


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """When each ``file.py:name`` was first called for one streamed chat completion."""
    directory, recorder = tmp_path_factory.mktemp("calls"), tmp_path_factory.mktemp("recorder")
    (recorder / "sitecustomize.py").write_text(RECORDER)
    environ = os.environ | {"PYTHONPATH": str(recorder), "RECORDED_CALLS": str(directory)}
    first = dict[str, float]()
    with Server("--engine", "torch", directory=directory, environ=environ) as server:
        processes = [*server.children("api-server"), *server.children("engine")]
        for process in processes:
            process.send_signal(SIGNAL)
        files = [directory / str(process.pid) for process in processes]
        begun = [file.with_suffix(".begun") for file in files]
        wait_until(lambda: all(file.exists() for file in begun), 30, "the start of all records")
        body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 128, "stream": True}
        body |= {"seed": 1, "temperature": 1.0, "ignore_eos": True}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200
        for process in processes:
            process.send_signal(SIGNAL)
        wait_until(lambda: all(file.exists() for file in files), 30, "the records of all processes")
    for file in files:
        for path, name, at in json.loads(file.read_text()):
            module = path.rpartition("/penstock/")[2]
            for part in {name.rpartition(".")[2], name.partition(".")[0]}:
                key = f"{module}:{part}"
                first[key] = min(at, first.get(key, at))
    return first


@pytest.mark.parametrize(("title", "least"), [("A request", 20), ("A token", 15)])
def test_a_ladder_names_what_is_called_in_its_order(called: dict[str, float], title: str, least: int) -> None:
    steps = ladder(title)
    assert len(steps) >= least
    assert [step for step in steps if step not in called] == [], "these are not called"
    in_order = sorted(steps, key=lambda step: called[step])
    assert steps == in_order
