"""The process that submits streams to a measured engine and reads their frames, as an API server does.

Runs as ``python -m penstock.bench.frame_reader``, started by :mod:`penstock.bench.engine_benchmark`. Reads a
ReaderPlan as a line of JSON from standard input. Writes an empty line to standard output each time all
streams have another ``every`` tokens, so that the engine is never measured while its queue is full. Exits
when it is killed or standard input is closed.
"""

from __future__ import annotations

import select
import sys

import msgspec
import numpy as np
import zmq

from penstock.bench.errors import BenchError
from penstock.wire.frames import decode_frame
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    EngineMetrics,
    FrameHeader,
    Hello,
    SamplingParams,
    Submit,
    Welcome,
    decode_from_engine,
    encode,
)
from penstock.wire.sockets import EngineLink, server_identity

SUBMITS_PER_MESSAGE = 16
"""The batch size of API servers."""


class ReaderPlan(msgspec.Struct, frozen=True):
    """``streams`` requests of ``prompt_tokens`` tokens; a line is written after ``every`` tokens of each."""

    address: str
    streams: int
    prompt_tokens: int
    prompt_token: int
    max_tokens: int
    every: int


class FrameReader:
    """One DEALER socket, as in an API server."""

    def __init__(self, plan: ReaderPlan) -> None:
        self._plan = plan
        self._link = EngineLink(zmq.Context(), plan.address, server_identity(0, 0))
        self._poller = select.poll()
        self._poller.register(self._link.fd, select.POLLIN)
        self._poller.register(sys.stdin.fileno(), select.POLLHUP)

    def submit(self) -> None:
        """Send Hello and all streams."""
        plan = self._plan
        self._link.send([encode(Hello(ENGINE_PROTOCOL_VERSION, 0, 0))])
        prompts = np.full((plan.streams, plan.prompt_tokens), plan.prompt_token, "<i4")
        prompts[:, 0] = np.arange(plan.streams)  # no two have a common prefix
        requests = [
            encode(Submit(stream, prompts[stream].tobytes(), SamplingParams(plan.max_tokens, stream)))
            for stream in range(plan.streams)
        ]
        for start in range(0, len(requests), SUBMITS_PER_MESSAGE):
            self._link.send(requests[start : start + SUBMITS_PER_MESSAGE])

    def run(self) -> None:
        """Read frames until standard input is closed. Raises BenchError for an unexpected message."""
        tokens = np.zeros(self._plan.streams, np.int64)
        goal = self._plan.every
        while True:
            parts = self._link.receive()
            if parts is None:
                # The descriptor is edge-triggered: the timeout covers a missed edge.
                events = self._poller.poll(20)
                if any(mask & select.POLLHUP for _, mask in events):
                    return
                continue
            message = decode_from_engine(parts[0])
            if isinstance(message, FrameHeader):
                frame = decode_frame(message, parts[1])
                if not (tokens[frame.stream] == frame.position).all():
                    raise BenchError("rows are out of order")
                tokens[frame.stream] += frame.counts()
                if tokens[0] >= goal and int(tokens.min()) >= goal:
                    goal += self._plan.every
                    sys.stdout.write("\n")
                    sys.stdout.flush()
            elif not isinstance(message, Welcome | EngineMetrics):
                raise BenchError(f"the engine sent {message!r}")


def main() -> None:
    """Entry point of the process."""
    reader = FrameReader(msgspec.json.decode(sys.stdin.buffer.readline(), type=ReaderPlan))
    reader.submit()
    reader.run()


if __name__ == "__main__":
    main()
