"""Signals that end no gateway, and the one of a closed terminal, which drains it."""

from __future__ import annotations

import os
import signal

from tests.gateway.behaviours import DONE, TEXT, stalled_in_stream
from tests.gateway.processes import WAIT_S, Gateway, Upstream, eventually, gateway

BODY = {"model": "m", "prompt": "p", "stream": True}
STRAY = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGIO,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
)


def until_logged(front: Gateway, text: str) -> None:
    eventually(lambda: front.process.poll() is not None or any(text in line for line in front.lines))
    assert any(text in line for line in front.lines)


def end_stream(server: Upstream) -> None:
    server.calls[-1].chunk(f"data: {DONE}\n\n".encode())
    server.calls[-1].send(b"0\r\n\r\n")


def test_sighup_and_stray_signals_break_no_stream() -> None:
    with Upstream(stalled_in_stream) as server, gateway(server) as front:
        with front.client.stream("POST", "/v1/completions", json=BODY) as reply:
            lines = reply.iter_lines()
            assert next(lines) == f"data: {TEXT}"
            for signum in (*STRAY, signal.SIGHUP):
                front.process.send_signal(signum)
                for worker in front.workers:
                    worker.send_signal(signum)
            until_logged(front, "replaces gateway 0")
            end_stream(server)
            assert f"data: {DONE}" in list(lines)
        assert front.process.poll() is None
        assert front.client.get("/ready").status_code == 200


def test_a_closed_terminal_drains() -> None:
    ours, theirs = os.openpty()
    with Upstream(stalled_in_stream) as server, gateway(server, terminal=theirs) as front:
        os.close(theirs)
        with front.client.stream("POST", "/v1/completions", json=BODY) as reply:
            lines = reply.iter_lines()
            assert next(lines) == f"data: {TEXT}"
            os.close(ours)
            until_logged(front, "draining: 1 requests are in flight")
            end_stream(server)
            assert f"data: {DONE}" in list(lines)
        assert front.process.wait(WAIT_S) == 0
