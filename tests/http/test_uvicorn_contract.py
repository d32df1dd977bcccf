"""The undocumented parts of uvicorn that penstock/http relies on.

Each is listed once with its use. If a release of uvicorn drops or changes one, a test fails and names it;
``test_the_list_is_complete`` fails if ``http1.py`` or ``server.py`` uses one that is not listed.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from penstock.http import http1, server

METHODS: dict[str, tuple[str, str]] = {
    # of uvicorn.Server: parameters, use
    "__init__": ("self config", "HttpServer calls it"),
    "serve": ("self sockets", "HttpServer calls it"),
    "startup": ("self sockets", "uvicorn calls it; HttpServer replaces it"),
    "shutdown": ("self sockets", "uvicorn calls it; HttpServer extends it"),
    "capture_signals": ("self", "uvicorn calls it; HttpServer replaces it"),
    "on_tick": ("self counter", "it keeps the date header up to date"),
}

ATTRIBUTES: dict[type, dict[str, tuple[type, str]]] = {
    ServerState: {
        "connections": (set, "connections add themselves; shutdown() ends and awaits them"),
        "default_headers": (list, "the date"),
        "tasks": (set, "connections add their applications; shutdown() awaits them"),
        "total_requests": (int, "counted at each reply's end"),
    },
    uvicorn.Server: {
        "config": (uvicorn.Config, "made by HttpServer"),
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


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_there_with_its_parameters(name: str) -> None:
    expected, use = METHODS[name]
    method = getattr(uvicorn.Server, name, None)
    assert method is not None, f"{release()} has no Server.{name}() any more: {use}"
    found = " ".join(inspect.signature(method).parameters)
    assert found == expected, f"{release()}: Server.{name}() takes ({found}) instead of ({expected}): {use}"


def test_config_takes_the_options() -> None:
    known = inspect.signature(uvicorn.Config).parameters
    missing = [name for name in CONFIG.split() if name not in known]
    assert not missing, f"{release()}: Config does not take {', '.join(missing)} any more"


def objects() -> dict[type, Any]:
    """One object of each class."""

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = uvicorn.Config(app, http=http1.ServerProtocol, ws="none", lifespan="off", log_config=None)
    made = uvicorn.Server(config)
    return {ServerState: made.server_state, uvicorn.Server: made}


@pytest.mark.parametrize("owner", ATTRIBUTES, ids=lambda owner: owner.__name__)
def test_the_attributes_are_there(owner: type) -> None:
    found = objects()[owner]
    for name, (kind, use) in ATTRIBUTES[owner].items():
        assert hasattr(found, name), f"{release()} has no {owner.__name__}.{name} any more: {use}"
        value = getattr(found, name)
        assert isinstance(value, kind), (
            f"{release()}: {owner.__name__}.{name} is {value!r} instead of a {kind}: {use}"
        )


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
    listed = {*METHODS} | {name for names in ATTRIBUTES.values() for name in names}
    known = {"servers"}
    for owner, made in objects().items():
        known |= {*vars(made), *vars(owner)}
    used = names_used(http1) | names_used(server)
    own = {"drain"}  # of HttpServer
    assert used & known - listed - own == {"servers"}
    assert listed - used == {"on_tick", "config"}, "listed, but not used"


def names_used(module: Any) -> set[str]:
    """Attributes that a module reads or sets, and functions that it defines."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
