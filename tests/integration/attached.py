"""A real ``penstock serve --attach``, with engines that speak vLLM's wire and make tokens on a clock."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.engine.vocabulary import read_vocab_size
from penstock.supervisor.startup.model_resolution import DEMO_DIR
from tests.integration.server import START_S, Server, wait_until

_ADDRESS = re.compile(r"--data-parallel-address (\S+) --data-parallel-rpc-port ([0-9]+)")
STEP_MS = "5"


class AttachedServer:
    """The server, and its engines by rank. Use it as a context."""

    def __init__(
        self,
        *options: str,
        directory: Path,
        ranks: int = 2,
        start: bool = True,
        attach: str = "127.0.0.1:0",
        engine_options: tuple[str, ...] = (),
    ) -> None:
        """``start``: start all engines; else the first client of :meth:`start_engine` does."""
        self._ranks = ranks
        self._start = start
        self._engine_options = engine_options
        self.engines: dict[int, subprocess.Popen[bytes]] = {}
        self.server = Server(
            *(
                str(DEMO_DIR),
                "--attach",
                attach,
                "--data-parallel-size",
                str(ranks),
                "--served-model-name",
                "m",
                *options,
            ),
            directory=directory,
        )

    def __enter__(self) -> Self:
        try:
            if self._start:
                for rank in range(self._ranks):
                    self.start_engine(rank)
                self.ready()
        except BaseException:
            self._end_engines()
            self.server.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_engines()
        self.server.__exit__(kind, error, trace)

    def ready(self) -> None:
        """Wait until clients are served, and all engines that were started are up."""
        self.server.__enter__()
        self.up(len(self.engines))

    def up(self, engines: int) -> None:
        wait_until(
            lambda: self.server.metric("penstock:engine_up") == engines,
            START_S,
            f"{engines} engines being up",
        )

    @property
    def address(self) -> tuple[str, int]:
        """Where engines connect first."""
        wait_until(lambda: _ADDRESS.search(self.server.log), START_S, "the address of the handshake")
        found = _ADDRESS.search(self.server.log)
        assert found is not None
        return found[1], int(found[2])

    def start_engine(self, rank: int, *options: str) -> subprocess.Popen[bytes]:
        host, port = self.address
        own = ("--rank", str(rank), "--ranks", str(self._ranks), "--step-ms", STEP_MS)
        vocabulary = ("--vocab-size", str(read_vocab_size(DEMO_DIR)))
        command = [sys.executable, "-m", "penstock.bench.clock.engine", host, str(port)]
        self.engines[rank] = subprocess.Popen([*command, *own, *vocabulary, *self._engine_options, *options])
        return self.engines[rank]

    def kill_engine(self, rank: int) -> None:
        """With SIGKILL."""
        engine = self.engines.pop(rank)
        engine.kill()
        engine.wait()

    def _end_engines(self) -> None:
        for rank in list(self.engines):
            self.kill_engine(rank)
