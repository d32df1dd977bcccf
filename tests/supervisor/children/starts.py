"""Starts children as a supervisor does, in a process of its own, and prints what it sees."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from penstock.supervisor.children.child_process import ChildProcess
from penstock.supervisor.children.child_starter import ChildStarter, reap_orphans
from penstock.supervisor.startup.file_limit import raise_file_limit
from penstock.wire.channel import ChildGone
from penstock.wire.control import ProcessFailed, Ready, Stop
from tests.launches import launch
from tests.supervisor.harness import PATIENCE_S

MODULE = "tests.supervisor.children.told"


def reports(child: ChildProcess) -> Any:
    """The next report; None: its end of the channel is closed."""
    poll = select.poll()
    poll.register(child.channel, select.POLLIN)
    while poll.poll(PATIENCE_S * 1000):
        try:
            for report in child.channel.receive():
                if isinstance(report, Ready | ProcessFailed):
                    return report
        except ChildGone:
            return None
    return "nothing"


def ended(child: ChildProcess) -> int | None:
    """Its exit code."""
    until = time.monotonic() + PATIENCE_S
    while (code := child.poll()) is None and time.monotonic() < until:
        time.sleep(0.01)
    return code


def main() -> None:
    seen: dict[str, Any] = {}
    raise_file_limit()
    kept = os.open(os.devnull, os.O_RDONLY)  # a descriptor that children are not to have
    os.set_inheritable(kept, True)
    with ChildStarter(MODULE, ["json"]) as starter:
        first = starter.start(launch("engine"), pass_fds=[kept])
        other = starter.start(launch("engine", index=1))
        seen["first"], seen["other"] = reports(first).info, reports(other).info
        seen["descriptors"] = first.pid, kept
        os.kill(first.pid, signal.SIGKILL)
        seen["killed"] = reports(first), ended(first)
        other.channel.send(Stop())
        seen["stopped"] = reports(other), ended(other)
        third = starter.start(launch("engine", index=2))
        orphan = reports(third).info["helper"]
        third.kill()
        seen["third"] = ended(third)
        os.kill(int(orphan), signal.SIGKILL)
        until = time.monotonic() + PATIENCE_S
        while os.path.exists(f"/proc/{orphan}") and time.monotonic() < until:
            reap_orphans(())
            time.sleep(0.01)
        seen["orphan is left"] = os.path.exists(f"/proc/{orphan}")
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        [template] = map(int, children.split())
        os.kill(template, signal.SIGKILL)
        fourth = starter.start(launch("engine", index=3))
        seen["fourth"] = reports(fourth).info
        fourth.kill()
        fourth.close()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as inherited
    with ChildStarter(MODULE, ["json"]) as starter:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        seventh = starter.start(launch("engine"))
        seen["ignoring"] = reports(seventh).info
        seventh.kill()
        seventh.close()
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        [template] = map(int, children.split())
        os.kill(template, signal.SIGSTOP)
        began = time.monotonic()
        eighth = starter.start(launch("engine"))
        seen["stopped template"] = time.monotonic() - began, reports(eighth).info
        eighth.kill()
        eighth.close()
    low = [os.dup(kept) for _ in range(1100)]
    with ChildStarter(MODULE, ["json"]) as starter:
        ninth = starter.start(launch("engine"))
        seen["many descriptors"] = reports(ninth).info
        ninth.kill()
        ninth.close()
    for number in low:
        os.close(number)
    with ChildStarter(MODULE, ["tests.no_such_module"]) as starter:
        fifth = starter.start(launch("engine"))
        seen["fifth"] = reports(fifth).info
        fifth.kill()
        fifth.close()
    with ChildStarter(MODULE, ["json"], environ={**os.environ, "PYTHONHASHSEED": "7"}) as starter:
        sixth = starter.start(launch("engine"))
        seen["sixth"] = reports(sixth).info
        os.kill(sixth.pid, signal.SIGSTOP)
        seen["stopped child"] = sixth.pid
    print(json.dumps(seen), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # children end with this process, also one that is stopped


if __name__ == "__main__":
    sys.exit(main())
