"""``penstock status --pid``: which processes are the front end, and what they take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.cli.front_end import family, text, watch
from penstock.cli.main import main
from penstock.client import Client

FAMILY = """
import subprocess, sys, setproctitle
name, *children = sys.argv[1].split("|")
setproctitle.setproctitle(name)
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
more = sys.argv[2:]
started = [subprocess.Popen([sys.executable, "-c", more[0], each, *more], **pipes) for each in children]
for child in started:
    child.stdout.readline()
print(flush=True)
while name == more[1]:
    pass
sys.stdin.read()
"""
NOBODY = "http://127.0.0.1:9"


@contextmanager
def processes(*titles: str, busy: str = "") -> Iterator[int]:
    """A process with the first title and children with the others, of which one may take a whole core."""
    command = [sys.executable, "-c", FAMILY, "|".join(titles), FAMILY, busy]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        try:
            assert first.stdout is not None
            first.stdout.readline()
            yield first.pid
        finally:
            for each in family(first.pid)[::-1]:
                subprocess.run(["kill", "-9", str(each.pid)], check=True)


@pytest.mark.parametrize(
    ("titles", "front_end"),
    [
        (["vllm serve Qwen/Qwen3-0.6B", "VLLM::EngineCore"], [True, False]),
        (["vllm serve m", "VLLM::ApiServer_0", "VLLM::EngineCore_DP0"], [False, True, False]),
        (["python -m sglang.launch_server", "sglang::scheduler", "sglang::detokenizer"], [True, False, True]),
        (["penstock: supervisor", "penstock: api-server 0", "penstock: engine 0"], [False, True, False]),
    ],
)
def test_the_front_end_is_told_by_titles(titles: list[str], front_end: list[bool]) -> None:
    with processes(*titles) as pid:
        members = family(pid)
    assert [each.title for each in members] == titles
    assert [each.front_end for each in members] == front_end


def test_a_busy_front_end_limits_its_server() -> None:
    family = processes("vllm serve m", "VLLM::EngineCore", busy="vllm serve m")
    with family as pid, Client(NOBODY, None, 1.0) as client:
        found = watch(pid, client, 0.3)
    first, engine = found["processes"]
    assert first["share"] > 5 * engine["share"]
    assert first["busiest_thread"] > 0
    assert found["busiest"] == first["busiest_thread"]
    found["busiest"] = 0.93
    assert text(found).endswith("takes 93% of a core: it limits this server.")


def test_a_helper_may_end_meanwhile() -> None:
    code = "import subprocess, sys; print(flush=True); subprocess.run(['sleep', '1']); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen([sys.executable, "-c", code], **pipes) as first,  # type: ignore[call-overload]
        Client(NOBODY, None, 1.0) as client,
    ):
        first.stdout.readline()
        while len(family(first.pid)) == 1:
            pass
        found = watch(first.pid, client, 2.0)
        first.stdin.close()
    assert [each["pid"] for each in found["processes"]] == [first.pid]


def test_without_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--pid", str(2**22 + 1), "--url", NOBODY]) == 1
    assert "process 4194305 does not exist" in capsys.readouterr().err


def test_a_reading_needs_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--pid", "1", "--interval", "0"]) == 2
    assert main(["status", "--pid", "1", "--watch"]) == 2
    assert "pid: shares are those of one --interval" in capsys.readouterr().err
