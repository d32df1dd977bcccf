"""Replies of administrative routes that engines carry out: one receipt per engine; and what they take."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from penstock.api.api_request import ApiRequest
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import OperationOutcome, OperationResult, RpcRequest
from penstock.http.admission import unavailable
from penstock.http.errors import ApiError, encode_json
from penstock.http.request import HttpRequest
from penstock.wire.messages import CONFLICT, MAX_IDEMPOTENCY_KEY_LENGTH

DEFAULT_TIMEOUT_S = 60.0
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1.0, 3600.0

_STATUS = {
    OperationOutcome.DONE: 200,
    OperationOutcome.CONFLICT: 409,
    OperationOutcome.UNDECIDED: 504,
}
NOT_EVERY_SERVER = "Not every API server has observed it in time."
_LATE = frozenset({"timeout", "aborted"})
"""Codes of receipts that report no failure: the engine did not answer, or nobody waited for it."""


@dataclass(frozen=True, slots=True)
class OperationOptions:
    """Query parameters and key of one request."""

    parameters: dict[str, str]
    key: str
    timeout_s: float


def operation_options(http: HttpRequest, *names: str) -> OperationOptions:
    """From the query, which may have ``names`` and ``timeout``, and the header Idempotency-Key. Raises
    ApiError."""
    allowed = (*names, "timeout")
    parameters: dict[str, str] = {}
    for name, value in parse_qsl(http.query.decode("latin-1"), keep_blank_values=True):
        if name not in allowed:
            known = ", ".join(allowed)
            raise ApiError(400, f"{http.path} takes {known} in its query, not {name!r}.", param=name)
        if name in parameters:
            raise ApiError(400, f"{name} is given twice.", param=name)
        parameters[name] = value
    key = http.header(b"idempotency-key")
    if key is None:
        key = secrets.token_hex(16)
    elif not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY_LENGTH:
        raise ApiError(
            400,
            f"Idempotency-Key has {len(key)} characters, 1 to {MAX_IDEMPOTENCY_KEY_LENGTH} are allowed.",
            param="Idempotency-Key",
        )
    return OperationOptions(parameters, key, _timeout(parameters.get("timeout")))


def _timeout(given: str | None) -> float:
    if given is None:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not MIN_TIMEOUT_S <= seconds <= MAX_TIMEOUT_S:
        raise refused_value("timeout", given, f"{MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g} seconds")
    return seconds


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


def refused_value(name: str, value: str, allowed: str) -> ApiError:
    """The error for a value that is not ``allowed``."""
    return ApiError(400, f"{name} is {value!r}, not {allowed}.", param=name)


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
