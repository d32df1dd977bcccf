"""``GET /debug/gc``: what the garbage collector of every process has to do."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import Receipt, RpcRequest
from penstock.http.asgi import encode_json, send_json
from penstock.http.sink import Receive, Scope, Send
from penstock.metrics.gc_policy import GarbageCollector

ANSWER_TIMEOUT_S = 5.0


class GarbageRoute:
    """This API server's report, and one of each engine; those of other API servers are at their own."""

    def __init__(self, name: str, collector: GarbageCollector, engine_client: EngineClient) -> None:
        self._name = name
        self._collector = collector
        self._engine_client = engine_client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ranks = self._engine_client.members()
        answers = await self._engine_client.calls.ask(ranks, RpcRequest("gc", {}), ANSWER_TIMEOUT_S)
        own = msgspec.to_builtins(self._collector.report())
        await send_json(send, encode_json(_document(self._name, own, answers)))


def _document(name: str, own: dict[str, Any], answers: list[Receipt]) -> dict[str, Any]:
    """Reports by process, and why there is none of others."""
    return {
        "processes": {name: own}
        | {f"engine {answer.rank}": answer.result for answer in answers if answer.error is None},
        "failed": {f"engine {answer.rank}": answer.error for answer in answers if answer.error is not None},
    }
