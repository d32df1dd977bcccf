"""API servers that are killed under overload, with steps so long that their requests wait in between."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from penstock.wire.control import Stop
from tests.engine.loop.test_process_end import Child
from tests.engine.peers import ApiServer
from tests.engine.support import submit
from tests.integration.server import SYNTHETIC, Server, wait_until

STEPS_S = 0.1


def test_connections_that_break_while_their_requests_wait(
    model_dir: Path, run_dir: str, stack: ExitStack, connect: Callable[..., ApiServer]
) -> None:
    child = Child(
        model_dir,
        run_dir,
        stack,
        synthetic_step_ms=int(1000 * STEPS_S),
        max_model_len=100_000,
        max_num_seqs=2,
        max_num_queued_reqs=2,
    )
    honest = connect(0)
    honest.send(submit(0, 20))
    honest.read(lambda: bool(honest.received.tokens))
    for epoch in range(4):
        victim = ApiServer(run_dir, 1, epoch)
        victim.hello()
        victim.send(*(submit(stream, 50) for stream in range(40)))
        victim.read(lambda victim=victim: bool(victim.received.failed))  # type: ignore[misc]
        victim.send(*(submit(100 + stream, 50) for stream in range(40)))
        victim.close()
    assert len(honest.read_ends(0).tokens[0]) == 20
    assert honest.received.failed == {}
    child.channel.send(Stop())
    assert child.end() == (0, "")


@pytest.mark.slow
def test_kills_of_api_servers_leave_the_engine_and_the_others_streams(tmp_path: Path) -> None:
    options = (*SYNTHETIC, "--synthetic-step-ms", "500", "--api-server-count", "3")
    limits = ("--max-num-seqs", "4", "--max-num-queued-reqs", "4")
    with Server(*options, *limits, directory=tmp_path) as server:
        (engine,) = server.children("engine")
        over = threading.Event()
        whole: list[int] = []
        cut: list[str] = []

        def ask() -> None:
            body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
            while not over.is_set():
                try:
                    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
                except httpx.TransportError as error:
                    cut.append(str(error))
                    continue
                if reply.status_code == 200:
                    whole.append(json.loads(reply.text)["usage"]["completion_tokens"])
                else:
                    assert reply.status_code in (429, 503), reply.text

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(24)]
        for thread in threads:
            thread.start()
        for _ in range(6):
            served = len(whole)
            wait_until(lambda served=served: len(whole) > served, 60, "requests are served")
            oldest = min(server.children("api-server"), key=psutil.Process.create_time)
            oldest.kill()
            wait_until(lambda: len(server.children("api-server")) == 3, 60, "it is replaced")
        over.set()
        for thread in threads:
            thread.join(60)
        assert [process.pid for process in server.children("engine")] == [engine.pid]
        assert psutil.pid_exists(engine.pid)
        assert set(whole) == {3}
        assert cut, "requests of the victims"
        assert "Traceback" not in server.log
