"""``GET /debug/gc``: garbage collector reports of this API server and of all engines."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.api.api_request import ApiRequest, Handler
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import Receipt, RpcRequest
from penstock.http.errors import encode_json
from penstock.metrics.gc_policy import GarbageCollector

ANSWER_TIMEOUT_S = 5.0


def gc_route(name: str, collector: GarbageCollector, engine_client: EngineClient) -> Handler:
    """The handler. ``name``: of this process; reports of other API servers are not included."""

    async def handle(request: ApiRequest) -> None:
        ranks = engine_client.members()
        answers = await engine_client.calls.ask(ranks, RpcRequest("gc", {}), ANSWER_TIMEOUT_S)
        own = msgspec.to_builtins(collector.report())
        await request.http.reply_json(encode_json(_document(name, own, answers)))

    return handle


def _document(name: str, own: dict[str, Any], answers: list[Receipt]) -> dict[str, Any]:
    """Reports by process name, and errors of engines that sent none."""
    return {
        "processes": {name: own}
        | {f"engine {answer.rank}": answer.result for answer in answers if answer.error is None},
        "failed": {f"engine {answer.rank}": answer.error for answer in answers if answer.error is not None},
    }
