"""Whatever a child sends on its control channel: the supervisor names the child, restarts it, and goes on."""

from __future__ import annotations

import signal

import psutil
import pytest

from penstock.exit_codes import EXIT_OK
from tests.integration.server import wait_until
from tests.supervisor.harness import PATIENCE_S, Serve


@pytest.mark.parametrize("nonsense", ["not UTF-8", "too long", "too deep", "text", "no such engine"])
def test_a_child_that_sends_nonsense_is_named_killed_and_started_again(serve: Serve, nonsense: str) -> None:
    running = serve({"engine": [nonsense, "serve"]})
    running.until("ERROR +supervisor +engine 0 was killed by SIGKILL: .*control message")
    running.until("engine 0 is ready again|^ready in")
    running.process.send_signal(signal.SIGTERM)
    assert running.exit_code() == EXIT_OK
    assert "Traceback" not in running.text


def test_a_flood_is_slowed_down_and_named_once(serve: Serve) -> None:
    running = serve({"engine": ["flood"]})
    running.until("engine 0 sends more than 1000 reports a second on its control channel; the rest waits")
    supervisor = psutil.Process(running.process.pid)
    before = supervisor.memory_info().rss
    busy = supervisor.cpu_times()
    second = supervisor.num_ctx_switches().voluntary
    wait_until(lambda: supervisor.num_ctx_switches().voluntary > second + 3, PATIENCE_S, "a pause")
    assert supervisor.memory_info().rss < before + (20 << 20)
    running.child("penstock: api-server 0").kill()
    running.until("api-server 0 is ready again")
    after = supervisor.cpu_times()
    assert after.user + after.system - busy.user - busy.system < 1.0
    running.process.send_signal(signal.SIGTERM)
    running.until("SIGTERM: shutting down")
    running.child("penstock: engine 0").kill()
    assert running.exit_code() == EXIT_OK
    assert running.text.count("sends more than") == 1
