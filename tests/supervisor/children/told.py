"""A child for tests: reports what it is, and runs until Stop."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading

from penstock.supervisor.children.child_main import exit_process, main
from penstock.wire.channel import ControlChannel
from penstock.wire.control import Stop


def run(control: ControlChannel) -> int:
    listed = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    descriptors = [number for number in listed if os.path.exists(f"/proc/self/fd/{number}")]
    helper = None
    if control.launch.index == 2:
        helper = subprocess.Popen(["sleep", "1000"]).pid  # it outlives this process
    control.ready(
        {
            "parent": os.getppid(),
            "descriptors": " ".join(map(str, descriptors)),
            "stdin": os.readlink("/proc/self/fd/0"),
            "forked": "penstock.supervisor.children.child_starter" in sys.modules,
            "command": " ".join(sys.orig_argv),
            "main": sys.modules["__main__"].__spec__.name if sys.modules["__main__"].__spec__ else "",
            "threads": " ".join(sorted(thread.name for thread in threading.enumerate())),
            "hash": hash("seed"),
            "helper": helper or 0,
        }
    )
    while True:
        select.select([control], (), ())
        if any(isinstance(command, Stop) for command in control.receive()):
            return 3


if __name__ == "__main__":
    exit_process(main(int(sys.argv[1]), lambda role: run))
