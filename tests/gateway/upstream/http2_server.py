"""A model server over HTTP/2, made with the `h2` library, whose streams behave as a test wants."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import h2.config
import h2.connection
import h2.events
import h2.settings

Behaviour = Callable[["Stream"], Awaitable[None]]
OK = [(b":status", b"200")]


@dataclass(eq=False)
class Stream:
    """One request."""

    connection: Connection
    stream_id: int
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    reset: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def send_head(self, headers: list[tuple[bytes, bytes]] | None = None, *, end: bool = False) -> None:
        self.connection.h2.send_headers(self.stream_id, headers or OK, end_stream=end)
        self.connection.flush()

    async def send(self, data: bytes, *, end: bool = False) -> None:
        """All of it, as windows allow."""
        while data:
            window = self.connection.h2.local_flow_control_window(self.stream_id)
            if size := min(window, len(data), 16_384):
                self.connection.h2.send_data(self.stream_id, data[:size])
                self.connection.flush()
                data = data[size:]
            else:
                self.changed.clear()
                await self.changed.wait()
        if end:
            self.end()

    def end(self) -> None:
        self.connection.h2.end_stream(self.stream_id)
        self.connection.flush()


class Connection(asyncio.Protocol):
    def __init__(self, server: Server) -> None:
        self.server = server
        self.streams: dict[int, Stream] = {}
        self.pinged = 0
        self.goaway: h2.events.ConnectionTerminated | None = None
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self.h2 = h2.connection.H2Connection(config)
        self.h2.local_settings = h2.settings.Settings(client=False, initial_values=self.server.settings)
        table_size = self.server.settings.get(h2.settings.SettingCodes.HEADER_TABLE_SIZE)
        if table_size is not None:  # the library would do it with the acknowledgement of a change
            self.h2.decoder.max_allowed_table_size = table_size
        self.h2.initiate_connection()
        self.flush()
        self.server.connections.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        for stream in self.streams.values():
            stream.reset.set()

    def flush(self) -> None:
        self.transport.write(self.h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        if self.server.deaf:
            return
        for event in self.h2.receive_data(data):
            match event:
                case h2.events.RequestReceived():
                    stream = Stream(self, event.stream_id, event.headers)
                    self.streams[event.stream_id] = stream
                    self.server.streams.append(stream)
                    self.server.start(stream)
                case h2.events.DataReceived():
                    stream = self.streams[event.stream_id]
                    stream.body += event.data
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.StreamEnded():
                    self.streams[event.stream_id].complete.set()
                case h2.events.StreamReset():
                    self.streams[event.stream_id].reset.set()
                case h2.events.PingReceived():
                    self.pinged += 1
                case h2.events.ConnectionTerminated():
                    self.goaway = event
                case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                    for stream in self.streams.values():
                        stream.changed.set()
        self.flush()


@dataclass
class Server:
    """Every stream runs ``behaviour``."""

    behaviour: Behaviour
    settings: dict[int, int] = field(default_factory=dict)
    deaf: bool = False
    """Nothing that comes is read."""
    url: str = ""
    connections: list[Connection] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, stream: Stream) -> None:
        async def run() -> None:
            await self.behaviour(stream)

        self.tasks.add(asyncio.ensure_future(run()))


@asynccontextmanager
async def http2_server(
    behaviour: Behaviour,
    settings: dict[int, int] | None = None,
    tls: ssl.SSLContext | None = None,
    port: int = 0,
) -> AsyncIterator[Server]:
    server = Server(behaviour, settings or {})
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", port, ssl=tls)
    scheme = "http" if tls is None else "https"
    server.url = f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for connection in server.connections:
            connection.transport.abort()
        for task in server.tasks:
            task.cancel()
        await asyncio.gather(*server.tasks, return_exceptions=True)
        await asyncio.gather(*(connection.lost.wait() for connection in server.connections))
