"""The process tree of one engine of vLLM's that is started here: its start, what it says, and its end."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from penstock.engine.attach.launch.keeper import GRACE_S, KILL_S, STOP
from penstock.exit_codes import describe_exit
from penstock.module_command import module_command

log = logging.getLogger(__name__)

DEFAULTS = {
    "NO_COLOR": "1",
    # Threads that wait between operators leave their cores to API servers.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Environment variables of vLLM, unless they are set."""
FEW_CPUS = 4
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""With few CPUs a model on the CPU runs in its engine's process, as one on a GPU does. Otherwise vLLM starts
a process for it, whose threads it binds to all CPUs but one, where the engine polls for their results. With
two CPUs that takes 1.6 times the CPU time for a token, and leaves the model one thread."""
BINDING = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU")
"""What binds these threads, which has an effect in a process of their own only."""
MAX_LINE_CHARS = 4096
MAX_LAST_LINES = 8
_LINE = re.compile(r"(?:\([^)]*\) )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) [^\[]*(?:\[[^\]]*\] )?(.*)")
"""A line of vLLM's log: the process, level, time, place and text."""


class VllmProcess:
    """``vllm`` with all that it starts, below a :mod:`.keeper`. A thread reads what it says."""

    def __init__(self, command: str | None, arguments: Sequence[str]) -> None:
        """Start it. ``command``: what runs ``vllm``, None: this environment's. Raises OSError."""
        own = module_command("penstock.engine.attach.launch.vllm_main")
        vllm = own if command is None else shlex.split(command)
        self._keeper = subprocess.Popen(
            [*module_command("penstock.engine.attach.launch.keeper"), *vllm, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(os.environ, len(os.sched_getaffinity(0))),
            start_new_session=True,
        )
        self.latest = ""
        """What it has said last."""
        self._last_lines: deque[str] = deque(maxlen=MAX_LAST_LINES)
        """Lines that may say why the process ends: of no level, or warnings and errors."""
        self._is_ending = False
        self._reader = threading.Thread(target=self._read, name="vllm-log", daemon=True)
        self._reader.start()

    def failure(self) -> str | None:
        """Return how it has ended by itself, with its last lines; None: it runs."""
        if self._keeper.poll() is None:
            return None
        self._reader.join(KILL_S)
        lines = "".join(f"\n  {line}" for line in self._last_lines)
        return f"vLLM {describe_exit(self._keeper.returncode)}{lines and f'; its last lines:{lines}'}"

    def end(self) -> None:
        """End all of its processes, by themselves first."""
        self._is_ending = True
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            self._keeper.stdin.write(STOP)
            self._keeper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(GRACE_S + KILL_S)

    def _read(self) -> None:
        """Log what vLLM says, until its last process has ended."""
        assert self._keeper.stdout is not None
        with io.TextIOWrapper(self._keeper.stdout, encoding="utf-8", errors="replace") as output:
            while line := output.readline(MAX_LINE_CHARS):
                if text := line.strip():
                    self._take_line(text)
        if not self._is_ending:
            log.error("vLLM %s", describe_exit(self._keeper.wait()))

    def _take_line(self, line: str) -> None:
        """Log warnings and errors until an end is asked for, and all lines with --log-level debug."""
        match = _LINE.match(line)
        level = logging.DEBUG if match is None else logging.getLevelNamesMapping()[match[1]]
        self.latest = line if match is None else match[2]
        if match is None or level >= logging.WARNING:
            self._last_lines.append(self.latest)
        is_told = level >= logging.WARNING and not self._is_ending
        log.log(level if is_told else logging.DEBUG, "vLLM: %s", self.latest)


def environment(own: Mapping[str, str], cpus: int) -> dict[str, str]:
    """Return the environment of vLLM. ``own``: that of this process, which takes precedence; ``cpus``: those
    that it may use."""
    is_bound = any(name in own for name in BINDING)
    return DEFAULTS | (ONE_PROCESS if cpus <= FEW_CPUS and not is_bound else {}) | dict(own)
