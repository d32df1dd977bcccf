"""Administrative routes that all engines execute, under vLLM's paths: sleep, wake up, cache reset, profiles.

Each replies with one receipt per engine. The header ``Idempotency-Key`` makes a retry safe.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from penstock.api.exchange import Exchange
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import Receipt, RpcRequest
from penstock.dispatch.two_phase_change import Outcome
from penstock.dispatch.two_phase_commit import SLEEP, TwoPhaseCommit
from penstock.http.admission import unavailable
from penstock.http.asgi import encode_json, request_header, send_json
from penstock.http.errors import ApiError
from penstock.http.sink import Scope
from penstock.wire.messages import CONFLICT, MAX_IDEMPOTENCY_KEY_LENGTH

DEFAULT_TIMEOUT_S = 60.0
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 1.0, 3600.0
MODES = ("abort", "wait")

_STATUS = {
    Outcome.DONE: 200,
    Outcome.CONFLICT: 409,
    Outcome.UNDECIDED: 504,
}
_LATE = frozenset({"timeout", "aborted"})
"""Codes of receipts that report no failure: the engine did not answer, or nobody waited for it."""


@dataclass(frozen=True, slots=True)
class _OperationOptions:
    """Query parameters and key of one request."""

    parameters: dict[str, str]
    key: str
    timeout_s: float


class OperationRoutes:
    """The handlers. ``profiles``: whether --profile-dir is set."""

    def __init__(
        self, engine_client: EngineClient, two_phase_commit: TwoPhaseCommit, *, profiles: bool
    ) -> None:
        self._engine_client = engine_client
        self._two_phase_commit = two_phase_commit
        self._profiles = profiles

    async def reset_prefix_cache(self, exchange: Exchange) -> None:
        """Drop all cached prefixes; running streams keep the blocks they use."""
        await self._run(exchange, "reset_prefix_cache", after_restart=True)

    async def start_profile(self, exchange: Exchange) -> None:
        self._check_profiles()
        await self._run(exchange, "start_profile", after_restart=True)

    async def stop_profile(self, exchange: Exchange) -> None:
        """Engines that were restarted have lost their profile and are not asked again."""
        self._check_profiles()
        await self._run(exchange, "stop_profile", after_restart=False)

    async def sleep(self, exchange: Exchange) -> None:
        options = _options(exchange.scope, "level", "mode")
        level, mode = options.parameters.get("level", "1"), options.parameters.get("mode", "abort")
        if level not in ("1", "2"):
            raise _refused("level", level, "1 or 2")
        if mode not in MODES:
            raise _refused("mode", mode, " or ".join(MODES))
        await self._change(exchange, options, "sleep", {"level": int(level), "mode": mode})

    async def wake_up(self, exchange: Exchange) -> None:
        await self._change(exchange, _options(exchange.scope), "wake_up", {"level": 0})

    async def is_sleeping(self, exchange: Exchange) -> None:
        await send_json(exchange.send, encode_json({"is_sleeping": self._engine_client.sleeps()}))

    def _check_profiles(self) -> None:
        if not self._profiles:
            raise ApiError(
                400, "There is no directory for profiles: serve with --profile-dir.", code="no_profile_dir"
            )

    async def _run(self, exchange: Exchange, name: str, *, after_restart: bool) -> None:
        options = _options(exchange.scope)
        ranks = self._members()
        request = RpcRequest(name, {}, options.key, after_restart=after_restart)
        receipts = await self._engine_client.calls.ask(ranks, request, options.timeout_s)
        outcome = Outcome.DONE
        if any(receipt.error is not None for receipt in receipts):
            conflict = any(receipt.code == CONFLICT for receipt in receipts)
            outcome = Outcome.CONFLICT if conflict else Outcome.PARTIAL
        await _reply(exchange, name, options, outcome=outcome, receipts=receipts)

    def _members(self) -> list[int]:
        members = self._engine_client.members()
        if not members:
            raise unavailable("There is no engine.", "no_engine")
        return members

    async def _change(
        self, exchange: Exchange, options: _OperationOptions, name: str, arguments: dict[str, Any]
    ) -> None:
        self._members()
        change = await self._two_phase_commit.change(SLEEP, arguments, options.key, options.timeout_s)
        assert change.outcome is not None  # it has ended
        await _reply(exchange, name, options, outcome=change.outcome, receipts=change.receipts())


def _options(scope: Scope, *names: str) -> _OperationOptions:
    """From the query, which may have ``names`` and ``timeout``, and the header Idempotency-Key. Raises
    ApiError."""
    allowed = (*names, "timeout")
    parameters: dict[str, str] = {}
    for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name not in allowed:
            known = ", ".join(allowed)
            raise ApiError(400, f"{scope['path']} takes {known} in its query, not {name!r}.", param=name)
        if name in parameters:
            raise ApiError(400, f"{name} is given twice.", param=name)
        parameters[name] = value
    key = request_header(scope, b"idempotency-key")
    if key is None:
        key = secrets.token_hex(16)
    elif not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY_LENGTH:
        raise ApiError(
            400,
            f"Idempotency-Key has {len(key)} characters, 1 to {MAX_IDEMPOTENCY_KEY_LENGTH} are allowed.",
            param="Idempotency-Key",
        )
    return _OperationOptions(parameters, key, _timeout(parameters.get("timeout")))


def _timeout(given: str | None) -> float:
    if given is None:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not LEAST_TIMEOUT_S <= seconds <= MOST_TIMEOUT_S:
        raise _refused("timeout", given, f"{LEAST_TIMEOUT_S:g} to {MOST_TIMEOUT_S:g} seconds")
    return seconds


def _refused(name: str, value: str, allowed: str) -> ApiError:
    return ApiError(400, f"{name} is {value!r}, not {allowed}.", param=name)


async def _reply(
    exchange: Exchange,
    name: str,
    options: _OperationOptions,
    *,
    outcome: Outcome,
    receipts: Sequence[Receipt],
) -> None:
    failed = [receipt for receipt in receipts if receipt.error is not None]
    late = all(receipt.code in _LATE for receipt in failed)
    status = _STATUS.get(outcome, 504 if late else 502)
    body: dict[str, Any] = {
        "operation": name,
        "key": options.key,
        "outcome": outcome.value,
        "failed": [receipt.rank for receipt in failed],
        "engines": [msgspec.to_builtins(receipt) for receipt in receipts],
    }
    if outcome is not Outcome.DONE:
        told = "; ".join(f"engine {receipt.rank}: {receipt.error}" for receipt in failed)
        message = f"{name}: {outcome.value}. {told or 'Not every API server has confirmed in time.'}"
        body |= msgspec.json.decode(ApiError(status, message, code=outcome.value).body())
    await send_json(exchange.send, encode_json(body), status)
