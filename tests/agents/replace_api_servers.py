"""Run by an agent: replaces the API servers of the server whose process id is in a file, and waits."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from pathlib import Path

import psutil


def api_servers(supervisor: psutil.Process) -> set[int]:
    found = set()
    for child in supervisor.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
            if "penstock: api-server" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


supervisor = psutil.Process(int(Path(sys.argv[1]).read_text()))
before = api_servers(supervisor)
supervisor.send_signal(signal.SIGHUP)
until = time.monotonic() + 240
while before & api_servers(supervisor) or not api_servers(supervisor):
    assert time.monotonic() < until, "the API servers are not replaced"
    time.sleep(0.05)
print("replaced")
