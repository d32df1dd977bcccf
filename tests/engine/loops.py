"""The loop of an engine process in a thread, with real sockets."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from penstock.config.serve import ServeConfig
from penstock.engine.base import Engine
from penstock.engine.loop.identity import EngineIdentity
from penstock.engine.loop.process import EngineLoop
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.wire.channel import ChildChannel, ControlChannel
from penstock.wire.control import Stop
from penstock.wire.sockets import RouterSocket, engine_address
from tests.engine.peers import DEADLINE_S

ENDLESS = 99_000
"""Tokens of a stream that does not end by itself within a test: more than a minute at 1 ms a step."""


class CountingSocket(RouterSocket):
    waits = 0

    def wait(self, timeout_s: float | None, also: int | None = None) -> bool:
        self.waits += 1
        return super().wait(timeout_s, also)


class Host:
    """An engine loop in a thread, with the supervisor's end of its control channel."""

    def __init__(self, model_dir: Path, run_dir: str, engine: Engine | None = None, **options: Any) -> None:
        """``engine``: None: a synthetic one."""
        self.engine: Engine = engine or SyntheticEngine(
            ServeConfig(engine="synthetic", **options), str(model_dir)
        )
        self.socket = CountingSocket(engine_address(run_dir, 0))
        self.loop = EngineLoop(self.engine, self.socket, EngineIdentity(0))
        self.supervisor, theirs = ChildChannel.pair()
        self.control = ControlChannel(theirs.detach())
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.loop.run(self.control)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self.socket.close()

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        if self._thread.is_alive():
            self.supervisor.send(Stop())
            self.join()
        self.control.close()
        self.supervisor.close()
