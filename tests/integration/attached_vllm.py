"""A real ``penstock serve --attach`` with engines of ``vllm serve --headless``, as the printed command starts
them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psutil

from penstock.engine.attach.launch import vllm_main
from tests.integration.server import START_S, VLLM_START_S, Server, wait_until

_ADDRESS = re.compile(r"--data-parallel-address (\S+) --data-parallel-rpc-port ([0-9]+)")


class AttachedVllm(Server):
    """Takes the arguments of a server with --engine vllm."""

    def __init__(
        self,
        *arguments: str,
        directory: Path,
        environ: Mapping[str, str] | None = None,
        start_s: float = VLLM_START_S,
        run_dir: str | None = None,
    ) -> None:
        """``run_dir``: of the server."""
        place = arguments.index("--engine")
        self._before, self._behind = arguments[:place], arguments[place + 2 :]
        self._environ = environ
        self._directory = directory
        self.engines: list[subprocess.Popen[bytes]] = []
        """One process tree for each host, of which each engine here has its own."""
        kept = () if run_dir is None else ("--run-dir", run_dir)
        super().__init__(
            *self._before,
            *("--attach", "127.0.0.1:0", *kept),
            *self._behind,
            directory=directory,
            environ=environ,
            start_s=start_s,
        )

    def __enter__(self) -> Self:
        try:
            for command in self.commands():
                self.start_engine(command)
            return super().__enter__()
        except BaseException:
            self.end()
            raise

    def commands(self) -> list[list[str]]:
        """What starts the engines, one host for each."""
        wait_until(lambda: _ADDRESS.search(self.log), START_S, "the address of the handshake")
        found = _ADDRESS.search(self.log)
        assert found is not None
        attach = ("--attach", f"{found[1]}:{found[2]}", "--data-parallel-size-local", "1")
        command = [sys.executable, "-m", "penstock.cli.main", "serve", *self._before, *attach]
        printed = subprocess.run(
            [*command, "--print-engine-command", *self._behind], check=True, capture_output=True, text=True
        )
        return [shlex.split(line) for line in printed.stdout.splitlines()]

    def start_engine(self, command: list[str]) -> None:
        program, *arguments = command
        assert program == "vllm"
        with (self._directory / f"engine-{len(self.engines)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(vllm_main.__file__), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if self._environ is None else dict(self._environ),
                start_new_session=True,
            )
        self.engines.append(process)

    def kill_engine(self, index: int) -> None:
        """With SIGKILL, the engine's own process included."""
        engine = self.engines[index]
        os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()

    def end(self) -> list[psutil.Process]:
        left = super().end()
        for index, engine in enumerate(self.engines):
            if engine.poll() is None:
                self.kill_engine(index)
        return left
