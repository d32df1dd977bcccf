"""A model server that is a process of its own: it can be killed, and told to behave otherwise."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tests.gateway.processes import WAIT_S, Behaviour, Call, Upstream
from tests.gateway.websocket.sockets import by_socket, by_turns

TOKEN = '{"choices":[{"index":0,"text":" a"}]}'
USAGE = '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
LATE_S = 0.5
"""What a slow server takes to its first token."""


def good(call: Call) -> None:
    """A stream in two pieces, so that it can be met in the middle."""
    call.stream(TOKEN, end=False)
    time.sleep(0.005)
    call.chunk(f"data: {TOKEN}\n\ndata: {USAGE}\n\ndata: [DONE]\n\n".encode())
    call.send(b"0\r\n\r\n")


def late(call: Call) -> None:
    time.sleep(LATE_S)
    good(call)


def stalled(call: Call) -> None:
    call.wait_until_gone()


def failing(call: Call) -> None:
    call.reply(500, b'{"error":{"message":"out of memory"}}')


def unready(call: Call) -> None:
    call.reply(503, b'{"error":{"message":"loading"}}')


def half_vectors(call: Call) -> None:
    """Half of a reply with vectors, or if its request says so nothing of it; never the rest."""
    if call.json["input"] != "nothing":
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 200000\r\n\r\n"
        call.send(head + b'{"data":[{"embedding":[' + b"0.125," * 16384)
    call.wait_until_gone()


BEHAVIOURS: dict[str, Behaviour] = {
    each.__name__: each for each in (good, late, stalled, failing, unready, half_vectors)
}
BEHAVIOURS["by_turns"] = by_socket(by_turns)


@dataclass
class ModelServer:
    """The process, from the test's side."""

    process: subprocess.Popen[str]

    @cached_property
    def url(self) -> str:
        return self._line()

    def behave(self, name: str) -> None:
        """From the next request on, as one of :data:`BEHAVIOURS`."""
        assert self._ask(name) == name

    def count(self) -> int:
        """Requests it has got."""
        return int(self._ask("count"))

    def _ask(self, line: str) -> str:
        assert self.url, "its first line"
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def model_server(port: int = 0) -> Iterator[ModelServer]:
    """It may still be starting: its ``url`` waits for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gateway.model_server", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield ModelServer(process)
    finally:
        process.kill()
        process.wait(WAIT_S)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()


def main() -> None:
    with Upstream(good, int(sys.argv[1])) as server:
        print(server.url, flush=True)
        for line in sys.stdin:
            name = line.strip()
            if name == "count":
                print(len(server.calls), flush=True)
            else:
                server.behaviour = BEHAVIOURS[name]
                print(name, flush=True)


if __name__ == "__main__":
    main()
