"""``/admin/engines``: which engines there are, and which of them take new streams.

A drained engine finishes what it runs and gets nothing new, from any API server, until it is resumed; also
when it is started again meanwhile. The supervisor keeps the list and tells every API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from penstock.dispatch.connections import EngineState
from penstock.dispatch.engine_client import EngineClient
from penstock.http.asgi import encode_json, send_json
from penstock.http.errors import ApiError
from penstock.http.sink import Handler, Receive, Scope, Send

LIST = "/admin/engines"
PREFIX = "/admin/engines/"
ANSWER_TIMEOUT_S = 5.0
_POLL_S = 0.01


class EngineRoutes:
    """``order(rank, draining)`` passes an order on to the supervisor; the fleet hears what it led to."""

    def __init__(self, engine_client: EngineClient, order: Callable[[int, bool], None]) -> None:
        self._engine_client = engine_client
        self._order = order

    def methods(self, path: str) -> dict[str, Handler] | None:
        """The handlers of a path below PREFIX; None when there is no such path or engine."""
        rank, _, action = path.removeprefix(PREFIX).partition("/")
        if action not in ("drain", "resume"):
            return None
        for engine in self._engine_client.engines:
            if rank == str(engine.rank):
                return {"POST": self._change(engine, action == "drain")}
        return None

    async def list(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(
            send, encode_json({"engines": [describe(engine) for engine in self._engine_client.engines]})
        )

    def _change(self, engine: EngineState, draining: bool) -> Handler:
        async def change(scope: Scope, receive: Receive, send: Send) -> None:
            self._order(engine.rank, draining)
            for _ in range(int(ANSWER_TIMEOUT_S / _POLL_S)):
                if engine.draining == draining:
                    await send_json(send, encode_json(describe(engine)))
                    return
                await asyncio.sleep(_POLL_S)
            raise ApiError(503, f"The supervisor did not answer within {ANSWER_TIMEOUT_S:g} s.")

        return change


def describe(engine: EngineState) -> dict[str, Any]:
    """``running`` and ``waiting`` count the streams of all API servers, as of the engine's latest step;
    ``host`` is its address, local for this one, and empty for an engine that never came or has left."""
    return {
        "rank": engine.rank,
        "host": engine.host,
        "up": engine.up,
        "draining": engine.draining,
        "asleep": engine.asleep and engine.up_to_date,
        "running": engine.running,
        "waiting": engine.waiting,
    }
