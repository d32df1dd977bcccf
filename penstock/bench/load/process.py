"""Controls the process of the load client."""

from __future__ import annotations

import select
import subprocess
import sys
from typing import Self

import msgspec

from penstock.bench.errors import BenchError
from penstock.bench.load.messages import (
    LoadFailure,
    LoadMessage,
    LoadPlan,
    LoadReady,
    RoundOrder,
    RoundResult,
)

ANSWER_GRACE = 10.0
"""Additional seconds for an answer: the client checks the time limit itself, then computes percentiles."""


class LoadProcess:
    """Runs ``penstock.bench.load.client``, in its own session so that Ctrl-C does not kill it.

    Use it as a context. The process exits when its standard input is closed, so it does not outlive this one.
    """

    def __init__(self, plan: LoadPlan, seconds: float) -> None:
        """Open the connections of ``plan`` within ``seconds``. Raises BenchError."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.bench.load.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            answer = self._ask(plan, seconds)
            if not isinstance(answer, LoadReady):
                raise BenchError(f"the load client did not become ready: {answer!r}")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the client."""
        return self._process.pid

    def run(self, *, keep: bool, seconds: float) -> RoundResult:
        """Run one round. Raises BenchError when it fails or takes longer than ``seconds``."""
        answer = self._ask(RoundOrder(keep=keep, seconds=seconds), seconds)
        if not isinstance(answer, RoundResult):
            raise BenchError(f"the load client did not run a round: {answer!r}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()  # it has nothing to clean up but sockets
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, message: LoadPlan | RoundOrder, seconds: float) -> LoadMessage:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        line = b""
        try:
            stdin.write(msgspec.json.encode(message) + b"\n")
            stdin.flush()
            # The client writes whole lines, so readline() does not block.
            if not select.select([stdout], [], [], max(seconds, 0) + ANSWER_GRACE)[0]:
                raise BenchError(f"the load client gave no answer in {seconds:.0f} s")
            line = stdout.readline()
        except BrokenPipeError:
            pass  # reported below
        if not line:
            raise BenchError(f"the load client ended with exit code {self._process.wait()}")
        answer: LoadMessage = msgspec.json.decode(line, type=LoadMessage)
        if isinstance(answer, LoadFailure):
            raise BenchError(answer.reason)
        return answer
