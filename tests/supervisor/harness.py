"""A supervisor in a process of its own."""

from __future__ import annotations

import fcntl
import re
import subprocess
import termios
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import psutil

# Far more than anything here takes; a test that reaches it has failed.
PATIENCE_S = 60.0


class Running:
    """A supervisor that runs, and what it wrote so far."""

    def __init__(self, command: list[str], env: Mapping[str, str], terminal: int | None = None) -> None:
        """``terminal``: descriptor of what becomes its controlling terminal; none by default."""
        self.text = ""
        self.process = subprocess.Popen(
            command,
            env=env,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=() if terminal is None else (terminal,),
            preexec_fn=None if terminal is None else partial(fcntl.ioctl, terminal, termios.TIOCSCTTY, 0),
        )
        self.pids = {self.process.pid}

    def until(self, pattern: str) -> re.Match[str]:
        """Reads lines until one has ``pattern``; fails when the output ends first."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.text += line
            found = re.search(pattern, line)
            if found:
                self.pids |= {child.pid for child in self.children()}
                return found
        raise AssertionError(f"{pattern!r} did not come:\n{self.text}")

    def until_ready(self) -> None:
        self.until(r"^ready in \d+\.\d s$")

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def child(self, title: str) -> psutil.Process:
        [found] = [child for child in self.children() if child.cmdline()[:1] == [title]]
        return found

    def port(self) -> int:
        found = re.search(r"URL +http://127\.0\.0\.1:(\d+)/v1", self.text)
        assert found, self.text
        return int(found[1])

    def run_dir(self) -> Path:
        found = re.search(r"runs as process \d+ in (\S+)", self.text)
        assert found, self.text
        return Path(found[1])

    def exit_code(self) -> int:
        """Waits for the end, and for everything it wrote."""
        assert self.process.stderr is not None
        self.text += self.process.stderr.read()
        return self.process.wait(timeout=PATIENCE_S)

    def close(self) -> None:
        """Ends what a failed test left: by process id, none of it may survive."""
        for child in self.children():
            child.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=PATIENCE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


Serve = Callable[..., Running]
