"""The private and undocumented parts of uvicorn that penstock/http relies on.

Each is listed once with its use. If a release of uvicorn drops or changes one, a test fails and names it;
``test_the_list_is_complete`` fails if ``http1.py`` or ``server.py`` uses one that is not listed.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.http import http1, server
from tests.http.connections import REQUEST, FakeTransport, settle

METHODS: dict[tuple[type, str], tuple[str, str]] = {
    # name: parameters, use
    (HttpToolsProtocol, "__init__"): (
        "self config server_state app_state _loop",
        "ServerProtocol calls it with the first three",
    ),
    (HttpToolsProtocol, "connection_made"): ("self transport", "ServerProtocol extends it"),
    (HttpToolsProtocol, "connection_lost"): ("self exc", "ServerProtocol extends it"),
    (HttpToolsProtocol, "pause_writing"): ("self", "ServerProtocol extends it"),
    (HttpToolsProtocol, "resume_writing"): ("self", "ServerProtocol extends it"),
    (HttpToolsProtocol, "data_received"): ("self data", "ServerProtocol extends it"),
    (HttpToolsProtocol, "send_400_response"): (
        "self msg",
        "uvicorn calls it when the parser fails; ServerProtocol replaces it",
    ),
    (HttpToolsProtocol, "on_message_begin"): ("self", "ServerProtocol extends it"),
    (HttpToolsProtocol, "on_headers_complete"): ("self", "ServerProtocol extends it"),
    (HttpToolsProtocol, "on_message_complete"): ("self", "ServerProtocol extends it"),
    (HttpToolsProtocol, "_start_asgi_task"): (
        "self cycle app",
        "uvicorn calls it for each request; ServerProtocol replaces it",
    ),
    (HttpToolsProtocol, "on_response_complete"): (
        "self",
        "uvicorn's cycles call it at a reply's end; ServerProtocol replaces it",
    ),
    (HttpToolsProtocol, "shutdown"): ("self", "Server.shutdown calls it for each connection"),
    (RequestResponseCycle, "send_500_response"): ("self", "for applications that fail"),
    (RequestResponseCycle, "receive"): ("self", "an argument of the application"),
    (RequestResponseCycle, "send"): ("self message", "an argument of the application"),
    (FlowControl, "pause_reading"): ("self", "to read nothing behind a refused request"),
    (FlowControl, "resume_reading"): ("self", "to read the next request"),
    (uvicorn.Server, "__init__"): ("self config", "HttpServer calls it"),
    (uvicorn.Server, "serve"): ("self sockets", "HttpServer calls it"),
    (uvicorn.Server, "startup"): ("self sockets", "uvicorn calls it; HttpServer replaces it"),
    (uvicorn.Server, "shutdown"): ("self sockets", "uvicorn calls it; HttpServer extends it"),
    (uvicorn.Server, "capture_signals"): ("self", "uvicorn calls it; HttpServer replaces it"),
    (uvicorn.Server, "on_tick"): ("self counter", "it keeps the date header up to date"),
}

ATTRIBUTES: dict[type, dict[str, tuple[type, str]]] = {
    # name: type, use
    HttpToolsProtocol: {
        "connections": (set, "to count connections"),
        "cycle": (RequestResponseCycle, "the latest request"),
        "flow": (FlowControl, "to know whether reading or writing is paused"),
        "headers": (list, "to measure a request head"),
        "loop": (asyncio.AbstractEventLoop, "to start the application"),
        "parser": (object, "to know the method"),
        "pipeline": (deque, "requests that wait for the reply before theirs, the newest on the left"),
        "scope": (dict, "to break a reference cycle"),
        "server_state": (ServerState, "for default headers and the request count"),
        "tasks": (set, "running applications"),
        "transport": (asyncio.BaseTransport, "to write"),
        "url": (bytes, "to measure a request head"),
    },
    RequestResponseCycle: {
        "chunked_encoding": (bool | None, "set where a reply is written without the cycle"),
        "disconnected": (bool, "set when the client is gone"),
        "keep_alive": (bool, "whether the connection is closed after the reply"),
        "message_event": (asyncio.Event, "wakes up the application that waits for the client"),
        "more_body": (bool, "whether the request has arrived whole"),
        "on_response": (object, "called at the end of a reply that is written without the cycle"),
        "response_complete": (bool, "read, and set where a reply is written without the cycle"),
        "response_started": (bool, "read, and set where a reply is written without the cycle"),
        "scope": (dict, "an argument of the application"),
        "waiting_for_100_continue": (bool, "cleared where a reply is written without the cycle"),
    },
    FlowControl: {
        "read_paused": (bool, "to know who is slow"),
        "write_paused": (bool, "to pause a reply from its start"),
    },
    ServerState: {
        "connections": (set, "for the sweep"),
        "default_headers": (list, "the date"),
        "tasks": (set, "shared with the connections"),
        "total_requests": (int, "counted at each reply's end"),
    },
    uvicorn.Server: {
        "config": (uvicorn.Config, "an argument of the connections"),
        "force_exit": (bool, "to stop"),
        "server_state": (ServerState, "an argument of the connections"),
        "should_exit": (bool, "to drain"),
        "started": (bool, "set by the startup that replaces uvicorn's"),
    },
}

CONFIG = """
    app http ws lifespan log_config log_level access_log proxy_headers server_header timeout_graceful_shutdown
"""


def release() -> str:
    return f"uvicorn {uvicorn.__version__}"


@pytest.mark.parametrize(("owner", "name"), METHODS, ids=lambda value: getattr(value, "__name__", value))
def test_a_method_is_there_with_its_parameters(owner: type, name: str) -> None:
    expected, use = METHODS[owner, name]
    method = getattr(owner, name, None)
    assert method is not None, f"{release()} has no {owner.__name__}.{name}() any more: {use}"
    found = " ".join(inspect.signature(method).parameters)
    assert found == expected, (
        f"{release()}: {owner.__name__}.{name}() takes ({found}) instead of ({expected}): {use}"
    )


def test_config_takes_the_options() -> None:
    known = inspect.signature(uvicorn.Config).parameters
    missing = [name for name in CONFIG.split() if name not in known]
    assert not missing, f"{release()}: Config does not take {', '.join(missing)} any more"


class Plain(HttpToolsProtocol):
    """uvicorn's protocol as it is, but for the application, which does not run."""

    started: RequestResponseCycle | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.started = cycle


async def objects() -> dict[type, Any]:
    """One object of each class, amid a request."""

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None)
    made = uvicorn.Server(config)
    protocol = Plain(config, made.server_state, {})
    protocol.connection_made(FakeTransport())
    protocol.data_received(REQUEST + REQUEST)
    await settle()
    assert protocol.started is not None, f"{release()}: _start_asgi_task is not called for a request any more"
    assert [cycle for cycle, _ in protocol.pipeline] == [protocol.cycle], (
        f"{release()}: the pipeline does not hold the request after the one in progress any more"
    )
    return {
        HttpToolsProtocol: protocol,
        RequestResponseCycle: protocol.started,
        FlowControl: protocol.flow,
        ServerState: made.server_state,
        uvicorn.Server: made,
    }


@pytest.mark.parametrize("owner", ATTRIBUTES, ids=lambda owner: owner.__name__)
def test_the_attributes_are_there(owner: type) -> None:
    found = asyncio.run(objects())[owner]
    for name, (kind, use) in ATTRIBUTES[owner].items():
        assert hasattr(found, name), f"{release()} has no {owner.__name__}.{name} any more: {use}"
        value = getattr(found, name)
        assert isinstance(value, kind), (
            f"{release()}: {owner.__name__}.{name} is {value!r} instead of a {kind}: {use}"
        )


def test_a_cycle_says_when_its_reply_is_complete() -> None:
    async def run() -> None:
        made = await objects()
        protocol, cycle = made[HttpToolsProtocol], made[RequestResponseCycle]
        await cycle.send({"type": "http.response.start", "status": 204, "headers": []})
        await cycle.send({"type": "http.response.body", "body": b"", "more_body": False})
        assert protocol.started is protocol.cycle, (
            f"{release()}: a cycle does not call on_response_complete at the end of its reply any more"
        )

    asyncio.run(run())


def test_startup_and_shutdown_are_called_and_servers_is_what_shutdown_closes() -> None:
    """``HttpServer.startup`` sets ``servers`` to an empty list."""
    source = inspect.getsource(uvicorn.Server)
    for call in ("self.startup(", "self.shutdown(", "self.capture_signals(", "in self.servers"):
        assert call in source, f"{release()}: Server has no {call!r} any more"
    assert "shutdown()" in inspect.getsource(uvicorn.Server.shutdown), (
        f"{release()}: Server.shutdown does not call shutdown() of its connections any more"
    )


def test_the_list_is_complete() -> None:
    """Every name of uvicorn's objects that the two modules use or define stands in a table above."""
    listed = {name for _, name in METHODS} | {name for names in ATTRIBUTES.values() for name in names}
    known = {"servers"}
    for owner, made in asyncio.run(objects()).items():
        known |= {*vars(made), *vars(owner)}
    own = {"body", "drain"}  # of ApiError and HttpServer
    used = names_used(http1) | names_used(server)
    assert used & known - listed - own == {"servers"}
    assert listed - used == {"on_tick"}, "listed, but not used"


def names_used(module: Any) -> set[str]:
    """Attributes that a module reads or sets, and functions that it defines."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
