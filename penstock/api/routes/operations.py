"""Administrative routes that all engines execute, under vLLM's paths: sleep, wake up, cache reset, profiles.

Each replies with one receipt per engine. The header ``Idempotency-Key`` makes a retry safe.
"""

from __future__ import annotations

from typing import Any

from penstock.api.api_request import ApiRequest
from penstock.api.routes.receipts import OperationOptions, operation_options, refused_value, send_receipts
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import OperationOutcome, OperationResult, RpcRequest
from penstock.dispatch.state_changes import StateChanges
from penstock.http.admission import unavailable
from penstock.http.errors import ApiError, encode_json
from penstock.wire.messages import CONFLICT, SLEEP, SLEEPING

MODES = ("abort", "wait")


class OperationRoutes:
    """The handlers. ``profiles``: whether --profile-dir is set."""

    def __init__(self, engine_client: EngineClient, state_changes: StateChanges, *, profiles: bool) -> None:
        self._engine_client = engine_client
        self._state_changes = state_changes
        self._profiles = profiles

    async def reset_prefix_cache(self, request: ApiRequest) -> None:
        """Drop all cached prefixes; running streams keep the blocks they use."""
        await self._run(request, "reset_prefix_cache", after_restart=True)

    async def start_profile(self, request: ApiRequest) -> None:
        self._check_profiles()
        await self._run(request, "start_profile", after_restart=True)

    async def stop_profile(self, request: ApiRequest) -> None:
        """Engines that were restarted have lost their profile and are not asked again."""
        self._check_profiles()
        await self._run(request, "stop_profile", after_restart=False)

    async def sleep(self, request: ApiRequest) -> None:
        options = operation_options(request.http, "level", "mode")
        level, mode = options.parameters.get("level", "1"), options.parameters.get("mode", "abort")
        if level not in ("1", "2"):
            raise refused_value("level", level, "1 or 2")
        if mode not in MODES:
            raise refused_value("mode", mode, " or ".join(MODES))
        value = {"level": int(level), "mode": mode}
        # no engine gives its memory back before all of them take no streams
        stages = [value | {"hold": True}, value]
        await self._set_sleep(request, options, "sleep", f"sleep level={level} mode={mode}", stages)

    async def wake_up(self, request: ApiRequest) -> None:
        await self._set_sleep(request, operation_options(request.http), "wake_up", "wake_up", [{"level": 0}])

    async def is_sleeping(self, request: ApiRequest) -> None:
        await request.http.reply_json(encode_json({"is_sleeping": self._engine_client.refusal() == SLEEPING}))

    def _check_profiles(self) -> None:
        if not self._profiles:
            raise ApiError(
                400, "There is no directory for profiles: serve with --profile-dir.", code="no_profile_dir"
            )

    async def _run(self, request: ApiRequest, name: str, *, after_restart: bool) -> None:
        options = operation_options(request.http)
        ranks = self._members()
        call = RpcRequest(name, {}, options.key, after_restart=after_restart)
        receipts = await self._engine_client.calls.ask(ranks, call, options.timeout_s)
        outcome = OperationOutcome.DONE
        if any(receipt.error is not None for receipt in receipts):
            conflict = any(receipt.code == CONFLICT for receipt in receipts)
            outcome = OperationOutcome.CONFLICT if conflict else OperationOutcome.PARTIAL
        await send_receipts(request, name, options, OperationResult(outcome, receipts))

    def _members(self) -> list[int]:
        members = self._engine_client.members()
        if not members:
            raise unavailable("There is no engine.", "no_engine")
        return members

    async def _set_sleep(
        self,
        request: ApiRequest,
        options: OperationOptions,
        name: str,
        asked: str,
        stages: list[dict[str, Any]],
    ) -> None:
        self._members()
        result = await self._state_changes.change(SLEEP, options.key, asked, stages, options.timeout_s)
        await send_receipts(request, name, options, result)
