"""The load client as a process: started, given orders, ended."""

from __future__ import annotations

import select
import subprocess
import sys
from typing import Self

import msgspec

from penstock.bench.errors import BenchError
from penstock.bench.load_client import LoadFailure, LoadMessage, LoadPlan, LoadReady, RoundOrder, RoundResult

ANSWER_GRACE = 10.0
"""Seconds an answer may be late: the client ends a round in time itself and then computes percentiles."""


class LoadProcess:
    """Starts ``penstock.bench.load_client`` in a session of its own, so that Ctrl-C leaves its end to us.

    Use it as a context. It ends with its standard input, so it does not outlive this process.
    """

    def __init__(self, plan: LoadPlan, seconds: float) -> None:
        """Opens the connections of ``plan``, within so many seconds. Raises BenchError."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.bench.load_client"],
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
        """The client's process."""
        return self._process.pid

    def run(self, *, keep: bool, seconds: float) -> RoundResult:
        """One round. Raises BenchError when it fails or is not over in so many seconds."""
        answer = self._ask(RoundOrder(keep=keep, seconds=seconds), seconds)
        if not isinstance(answer, RoundResult):
            raise BenchError(f"the load client did not run a round: {answer!r}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()  # it owns nothing but sockets
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
            # It writes a line at once, so a line can be read when anything can.
            if not select.select([stdout], [], [], max(seconds, 0) + ANSWER_GRACE)[0]:
                raise BenchError(f"the load client gave no answer in {seconds:.0f} s")
            line = stdout.readline()
        except BrokenPipeError:
            pass  # said below
        if not line:
            raise BenchError(f"the load client ended with exit code {self._process.wait()}")
        answer: LoadMessage = msgspec.json.decode(line, type=LoadMessage)
        if isinstance(answer, LoadFailure):
            raise BenchError(answer.reason)
        return answer
