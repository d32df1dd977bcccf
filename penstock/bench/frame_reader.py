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
from penstock.wire.arrays import I32
from penstock.wire.decoding import decode_from_engine
from penstock.wire.frames import TokenFrame, decode_frame
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    EngineMetrics,
    FrameHeader,
    Hello,
    SamplingParams,
    Submit,
    Welcome,
    encode,
)
from penstock.wire.sockets import EngineLink, server_identity

SUBMITS_PER_MESSAGE = 16
"""The batch size of API servers."""


class ReaderPlan(msgspec.Struct, frozen=True):
    """``streams`` requests of ``prompt_tokens`` tokens, spread over ``servers`` API servers; a line is
    written after ``every`` tokens of each, of which up to ``interval - 1`` may be held back."""

    address: str
    streams: int
    prompt_tokens: int
    prompt_token: int
    max_tokens: int
    every: int
    interval: int = 1
    logprobs: int = -1
    servers: int = 1


class FrameReader:
    """One DEALER socket for each API server, as these have."""

    def __init__(self, plan: ReaderPlan) -> None:
        self._plan = plan
        context = zmq.Context()
        self._links = [
            EngineLink(context, plan.address, server_identity(server, 0)) for server in range(plan.servers)
        ]
        self._poller = select.poll()
        for link in self._links:
            self._poller.register(link.fd, select.POLLIN)
        self._poller.register(sys.stdin.fileno(), select.POLLHUP)
        self._tokens = np.zeros(plan.streams, np.int64)
        """Tokens received of each stream."""
        self._goal = plan.every - (plan.interval - 1)

    def submit(self) -> None:
        """Send Hello and all streams."""
        plan = self._plan
        prompts = np.full((plan.streams, plan.prompt_tokens), plan.prompt_token, "<i4")
        prompts[:, 0] = np.arange(plan.streams)  # no two have a common prefix
        requests = [
            encode(
                Submit(
                    stream,
                    prompts[stream].tobytes(),
                    SamplingParams(plan.max_tokens, stream, logprobs=plan.logprobs),
                    interval=plan.interval,
                )
            )
            for stream in range(plan.streams)
        ]
        for server, link in enumerate(self._links):
            link.send([encode(Hello(ENGINE_PROTOCOL_VERSION, server, 0))])
            own = requests[server :: plan.servers]
            for start in range(0, len(own), SUBMITS_PER_MESSAGE):
                link.send(own[start : start + SUBMITS_PER_MESSAGE])

    def run(self) -> None:
        """Read frames until standard input is closed. Raises BenchError for an unexpected message."""
        while True:
            received = [parts for link in self._links if (parts := link.receive()) is not None]
            for parts in received:
                self._on_message(parts)
            if not received:
                # The descriptor is edge-triggered: the timeout covers a missed edge.
                events = self._poller.poll(20)
                if any(mask & select.POLLHUP for _, mask in events):
                    return

    def _on_message(self, parts: list[bytes]) -> None:
        message = decode_from_engine(parts[0])
        if isinstance(message, FrameHeader):
            frame = decode_frame(message, parts[1])
            tokens = self._tokens
            if not (tokens[frame.stream] == frame.position).all():
                raise BenchError("rows are out of order")
            if self._plan.logprobs >= 0 and len(_scored(frame)) != len(frame.tokens):
                raise BenchError("tokens without logprobs")
            tokens[frame.stream] += frame.counts()
            if tokens[0] >= self._goal and int(tokens.min()) >= self._goal:
                self._goal += self._plan.every
                sys.stdout.write("\n")
                sys.stdout.flush()
        elif not isinstance(message, Welcome | EngineMetrics):
            raise BenchError(f"the engine sent {message!r}")


def _scored(frame: TokenFrame) -> I32:
    """The tokens of a frame that have logprobs."""
    if frame.logprobs is None:
        return np.zeros(0, np.int32)
    return frame.logprobs.token[~frame.logprobs.continues()]


def main() -> None:
    """Entry point of the process."""
    reader = FrameReader(msgspec.json.decode(sys.stdin.buffer.readline(), type=ReaderPlan))
    reader.submit()
    reader.run()


if __name__ == "__main__":
    main()
