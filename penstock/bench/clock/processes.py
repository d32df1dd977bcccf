"""Processes of :mod:`.engine` for a server that attaches engines."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Self

from penstock.bench.server_process import model_len, slots
from penstock.config.bench import BenchHostConfig
from penstock.engine.vocabulary import read_vocab_size
from penstock.supervisor.startup.model_resolution import DEMO_DIR

_ADDRESS = re.compile(r"--data-parallel-address (\S+) --data-parallel-rpc-port ([0-9]+)")
END_SECONDS = 5.0


class ClockEngines:
    """Started when the server tells where engines connect; use it as a context, around the server's."""

    def __init__(self, config: BenchHostConfig) -> None:
        self._config = config
        self._processes: list[subprocess.Popen[bytes]] = []

    def on_line(self, line: str) -> None:
        """A line of the server's log."""
        found = _ADDRESS.search(line)
        if found is None or self._processes:
            return
        config = self._config
        options = {
            "--ranks": config.engines,
            "--step-ms": config.step_ms,
            "--tokens-per-step": config.tokens_per_step,
            "--max-num-seqs": slots(config),
            "--max-model-len": model_len(config),
            "--vocab-size": read_vocab_size(DEMO_DIR),
        }
        arguments = [f"{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "penstock.bench.clock.engine", found[1], found[2], *arguments]
        self._processes = [
            subprocess.Popen([*command, f"--rank={rank}"], stdin=subprocess.DEVNULL)
            for rank in range(config.engines)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(END_SECONDS)
