"""Every part of a real server is killed or stopped, in every phase: the rest goes on, and nothing is left."""

from __future__ import annotations

import random
import re
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.server import SYNTHETIC, Server, wait_until
from tests.supervisor.harness import PATIENCE_S

HANG_S = 3
DRAIN_S = 2
ARGUMENTS = (
    *SYNTHETIC,
    *("--synthetic-step-ms", "10", "--drain-timeout", str(DRAIN_S)),
    *("--api-server-count", "2", "--data-parallel-size", "2"),
    *("--engine-hang-timeout", str(HANG_S), "--api-server-hang-timeout", str(HANG_S)),
)
ROLES = ("api-server", "engine", "coordinator")


def serves(server: Server) -> bool:
    """Whether new requests are answered, by whichever API server."""
    with suppress(httpx.HTTPError):
        return server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, timeout=HANG_S + 5).is_success
    return False


def recovered(server: Server, parts: int) -> bool:
    """All processes are there, and every API server has every engine."""
    if sum(len(server.children(role)) for role in ROLES) != parts:
        return False
    with suppress(httpx.HTTPError, AssertionError):
        return all(server.metric("penstock:engine_up") == 2 for _ in range(4))
    return False


def stop(process: psutil.Process) -> None:
    process.suspend()


def kill(process: psutil.Process) -> None:
    process.kill()


def during_streams(server: Server, act: Callable[[], None]) -> list[str]:
    """The ends of streams that run while ``act`` happens."""
    ends: list[str] = []

    def run() -> None:
        try:
            ends.append(server.stream("x", max_tokens=150, ignore_eos=True)[-1])
        except (httpx.HTTPError, AssertionError) as error:  # its API server's connections ended
            ends.append(type(error).__name__)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: running(server) == 4, PATIENCE_S, "four streams")
    act()
    for thread in threads:
        thread.join(PATIENCE_S)
    return ends


def running(server: Server) -> float:
    with suppress(httpx.HTTPError, AssertionError):
        return server.metric("vllm:num_requests_running")
    return -1


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("fault", [stop, kill])
def test_a_part_that_hangs_or_dies_is_replaced_and_the_others_serve_on(
    role: str, fault: Callable[[psutil.Process], None], tmp_path: Path
) -> None:
    with Server(*ARGUMENTS, directory=tmp_path) as server:
        wait_until(lambda: recovered(server, 5), PATIENCE_S, "a whole fleet")
        victim = server.children(role)[0]
        ends = during_streams(server, lambda: fault(victim))
        lost = sum(end != "[DONE]" for end in ends)
        assert lost <= (3 if role == "api-server" else 0), ends
        wait_until(lambda: not victim.is_running(), PATIENCE_S, "the end of the victim")
        wait_until(lambda: recovered(server, 5), PATIENCE_S, "recovery")
        assert all(serves(server) for _ in range(4))
        why = "not heard of" if fault is stop else "was killed by SIGKILL"
        assert re.search(rf"ERROR +supervisor +{role} \d .*{why}", server.log)
        assert server.get("/admin/engines").is_success
        assert "Traceback" not in server.log


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
def test_parts_are_killed_and_stopped_in_any_phase_and_nothing_outlives_the_end(
    seed: int, tmp_path: Path
) -> None:
    """Parts, faults and phases by chance: while it serves, replaces its API servers, and ends."""
    chance = random.Random(seed)
    with Server(*ARGUMENTS, directory=tmp_path) as server:
        wait_until(lambda: recovered(server, 5), PATIENCE_S, "a whole fleet")
        for _ in range(chance.randint(1, 3)):
            if chance.random() < 0.5:
                server.process.send_signal(signal.SIGHUP)
            parts = [part for role in ROLES for part in server.children(role)]
            chance.choice([stop, kill])(chance.choice(parts))
            wait_until(lambda: serves(server), PATIENCE_S, "an answer")
        children = psutil.Process(server.process.pid).children(recursive=True)
        for victim in chance.sample(children, chance.randint(0, len(children))):
            with suppress(psutil.NoSuchProcess):
                chance.choice([stop, kill])(victim)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
        assert alive == []
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_a_second_sigterm_ends_streams_with_an_error_and_its_exit_code(tmp_path: Path) -> None:
    arguments = (*SYNTHETIC, "--synthetic-step-ms", "20", "--drain-timeout", "60")
    with Server(*arguments, directory=tmp_path) as server:
        ends = during_one_stream(server)
    assert "server_stopped" in ends, ends
    assert server.process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM while shutting down: running streams end with an error" in server.log


def during_one_stream(server: Server) -> str:
    """The last events of a stream during which the server gets SIGTERM twice."""
    found: list[str] = []
    reader = threading.Thread(
        target=lambda: found.extend(server.stream("x", max_tokens=1900, ignore_eos=True)[-2:])
    )
    reader.start()
    wait_until(lambda: running(server) == 1, PATIENCE_S, "a stream")
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "SIGTERM: shutting down" in server.log, PATIENCE_S, "the drain")
    threading.Event().wait(0.3)  # signals closer together count as one
    server.process.send_signal(signal.SIGTERM)
    reader.join(PATIENCE_S)
    return " ".join(found)
