"""A model server in a process of its own, because of its thousands of connections. It sends an event for
each request, and ends all streams when a connection says so.

``python -m tests.gateway.workers.held_streams FD``
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator

BODY = json.dumps({"model": "m", "prompt": "p", "stream": True}).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
END = b"data: [DONE]\n\n"
END_ALL = b"end all streams"


@contextlib.contextmanager
def held_streams() -> Iterator[int]:
    """The port of such a server, which runs until the end of the block."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        fd = listener.fileno()
        process = subprocess.Popen([sys.executable, "-m", __name__, str(fd)], pass_fds=[fd])
        try:
            yield listener.getsockname()[1]
        finally:
            process.kill()
            process.wait()


class ModelServer(asyncio.Protocol):
    def __init__(self, streams: list[asyncio.Transport]) -> None:
        self._streams = streams
        self._data = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._data.startswith(b"PRI"):  # the beginning of HTTP/2
            self._transport.close()
        elif self._data == END_ALL:
            for stream in self._streams:
                stream.write(_chunk(END) + b"0\r\n\r\n")
        elif self._data.endswith(BODY):
            self._data = b""
            self._transport.write(HEAD + _chunk(EVENT))
            self._streams.append(self._transport)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(fd: int) -> None:
    streams: list[asyncio.Transport] = []
    server = await asyncio.get_running_loop().create_server(
        lambda: ModelServer(streams), sock=socket.socket(fileno=fd), backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
