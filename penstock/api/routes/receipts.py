"""Replies of administrative routes that engines carry out: one receipt per engine."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.api.api_request import ApiRequest
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import OperationOutcome, OperationResult, RpcRequest
from penstock.http.admission import unavailable
from penstock.http.errors import ApiError, encode_json
from penstock.http.operation_options import OperationOptions
from penstock.wire.messages import CONFLICT

_STATUS = {
    OperationOutcome.DONE: 200,
    OperationOutcome.CONFLICT: 409,
    OperationOutcome.UNDECIDED: 504,
}
NOT_EVERY_SERVER = "Not every API server has observed it in time."
_LATE = frozenset({"timeout", "aborted"})
"""Codes of receipts that report no failure: the engine did not answer, or nobody waited for it."""


def members_of(engine_client: EngineClient) -> list[int]:
    """Ranks of the engines that an operation is for. Raises ApiError if there are none."""
    members = engine_client.members()
    if not members:
        raise unavailable("There is no engine.", "no_engine")
    return members


async def call_engines(
    engine_client: EngineClient,
    method: str,
    arguments: dict[str, Any],
    options: OperationOptions,
    *,
    after_restart: bool = True,
) -> OperationResult:
    """Run an operation once on each engine. Raises ApiError if there are none."""
    call = RpcRequest(method, arguments, options.key, after_restart=after_restart)
    receipts = await engine_client.calls.ask(members_of(engine_client), call, options.timeout_s)
    outcome = OperationOutcome.DONE
    if any(receipt.error is not None for receipt in receipts):
        conflict = any(receipt.code == CONFLICT for receipt in receipts)
        outcome = OperationOutcome.CONFLICT if conflict else OperationOutcome.PARTIAL
    return OperationResult(outcome, receipts)


async def send_receipts(
    request: ApiRequest, name: str, options: OperationOptions, result: OperationResult, **more: Any
) -> None:
    """The reply of the operation ``name``. ``more``: further fields, if it is done."""
    outcome = result.outcome
    failed = [receipt for receipt in result.receipts if receipt.error is not None]
    late = all(receipt.code in _LATE for receipt in failed)
    status = _STATUS.get(outcome, 504 if late else 502)
    body: dict[str, Any] = {
        "operation": name,
        "key": options.key,
        "outcome": outcome.value,
        **(more if outcome is OperationOutcome.DONE else {}),
        "failed": [receipt.rank for receipt in failed],
        "engines": [msgspec.to_builtins(receipt) for receipt in result.receipts],
    }
    if outcome is not OperationOutcome.DONE:
        told = "; ".join(f"engine {receipt.rank}: {receipt.error}" for receipt in failed)
        message = f"{name}: {outcome.value}. {told or result.reason or NOT_EVERY_SERVER}"
        body |= msgspec.json.decode(ApiError(status, message, code=outcome.value).body())
    await request.http.reply_json(encode_json(body), status)
