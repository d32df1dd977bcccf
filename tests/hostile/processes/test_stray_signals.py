"""Signals that nobody should send to a server's processes: no stream notices."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import psutil

from tests.integration.server import SYNTHETIC, Server, data_of

TO_ALL = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGIO,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
)
STRAY = (*TO_ALL, signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
ROLES = ("api-server", "coordinator", "engine")
TOKENS = 200


def test_stray_signals_to_children_break_no_stream(tmp_path: Path) -> None:
    options = ("--api-server-count", "2", "--data-parallel-size", "2", "--synthetic-step-ms", "10")
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server:
        children = [child for role in ROLES for child in server.children(role)]
        assert len(children) == 5
        body = {"prompt": "hello", "stream": True, "max_tokens": TOKENS, "ignore_eos": True, "n": 4}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as reply:
            chunks = reply.iter_text()
            text = next(chunks)
            for signum in STRAY:
                for child in children:
                    child.send_signal(signum)
                text += next(chunks, "")  # on a busy machine all may have come
            for signum in TO_ALL:
                server.process.send_signal(signum)
            text += "".join(chunks)
        events = data_of(text)
        assert events[-1] == "[DONE]"
        assert '"error":' not in text  # the text of a stream may be the word
        assert server.complete("after", max_tokens=5)
        assert [child for child in children if not child.is_running()] == []
        assert all(child.status() != psutil.STATUS_ZOMBIE for child in children)
        assert server.metric("penstock:process_restarts") == 0
