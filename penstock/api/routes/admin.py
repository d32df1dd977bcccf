"""``/admin/engines``: list, drain and resume engines.

A drained engine completes its streams and gets no new ones from any API server until it is resumed, even
across a restart. The supervisor keeps the list of drained engines and sends it to every API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from penstock.api.api_request import ApiRequest, Handler
from penstock.dispatch.connections import EngineState
from penstock.dispatch.engine_client import EngineClient
from penstock.http.errors import ApiError, encode_json

LIST = "/admin/engines"
PREFIX = "/admin/engines/"
ANSWER_TIMEOUT_S = 5.0
_POLL_S = 0.01


class EngineRoutes:
    """The handlers of these routes."""

    def __init__(self, engine_client: EngineClient, drain: Callable[[int, bool], None]) -> None:
        """``drain(rank, draining)`` asks the supervisor, which answers by updating ``engine_client``."""
        self._engine_client = engine_client
        self._drain = drain

    def methods(self, path: str) -> dict[str, Handler] | None:
        """Handlers by HTTP method of a path below PREFIX; None if there is no such action or engine."""
        rank, _, action = path.removeprefix(PREFIX).partition("/")
        if action not in ("drain", "resume"):
            return None
        for engine in self._engine_client.engines:
            if rank == str(engine.rank):
                return {"POST": self._set_draining(engine, action == "drain")}
        return None

    async def list(self, request: ApiRequest) -> None:
        engines = [describe(engine) for engine in self._engine_client.engines]
        await request.http.reply_json(encode_json({"engines": engines}))

    def _set_draining(self, engine: EngineState, draining: bool) -> Handler:
        async def handle(request: ApiRequest) -> None:
            self._drain(engine.rank, draining)
            for _ in range(int(ANSWER_TIMEOUT_S / _POLL_S)):
                if engine.draining == draining:
                    await request.http.reply_json(encode_json(describe(engine)))
                    return
                await asyncio.sleep(_POLL_S)
            raise ApiError(503, f"The supervisor did not answer within {ANSWER_TIMEOUT_S:g} s.")

        return handle


def describe(engine: EngineState) -> dict[str, Any]:
    """One engine's entry in the reply.

    ``running`` and ``waiting`` count streams of all API servers as of the engine's latest step. ``host`` is
    the engine's address, ``local`` on this host, empty for an engine that never connected or has left.
    ``state_errors`` says by name of a desired state, such as ``weights``, why the engine is not in it.
    """
    return {
        "rank": engine.rank,
        "host": engine.host,
        "up": engine.up,
        "draining": engine.draining,
        "asleep": engine.asleep,
        "paused": engine.paused,
        "weight_version": engine.weight_version,
        "state_errors": engine.state_errors,
        "running": engine.running,
        "waiting": engine.waiting,
    }
