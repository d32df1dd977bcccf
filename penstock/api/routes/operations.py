"""Administrative routes that all engines execute, under vLLM's paths: sleep, pause, aborts, profiles and so
on.

Each replies with one receipt per engine. The header ``Idempotency-Key`` makes a retry safe.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.api.api_request import ApiRequest
from penstock.api.routes.receipts import call_engines, members_of, send_receipts
from penstock.config.serve import ServeConfig
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.state_changes import StateChanges
from penstock.generation.request.body_decoder import BodyDecoder
from penstock.http.errors import ApiError, encode_json
from penstock.http.operation_options import (
    OperationOptions,
    operation_options,
    read_parameter_body,
    refused_value,
)
from penstock.wire.messages import PAUSE, SLEEP, SLEEPING, RequestId

MODES = ("abort", "wait")
PAUSE_MODES = (*MODES, "keep")
MAX_ABORT_BYTES = 768 << 10
"""Largest body of ``/abort_requests``: engines take calls of 1 MiB."""


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort_requests."""

    request_ids: Annotated[
        Annotated[list[Annotated[RequestId, Meta(min_length=1)]], Meta(min_length=1)] | None,
        Meta(description="X-Request-Id of the requests, or the ids of their replies."),
    ] = None
    prefix: Annotated[
        Annotated[RequestId, Meta(min_length=1)] | None, Meta(description="How these ids begin.")
    ] = None
    all: Annotated[bool | None, Meta(description="Abort every request.")] = None


class OperationRoutes:
    """The handlers."""

    def __init__(self, config: ServeConfig, engine_client: EngineClient, state_changes: StateChanges) -> None:
        self._engine_client = engine_client
        self._state_changes = state_changes
        self._profiles = config.profile_dir is not None
        self._decode_abort = BodyDecoder(AbortRequest, strict=False, once=True).decode

    # -- calls

    async def reset_prefix_cache(self, request: ApiRequest) -> None:
        """Drop all cached prefixes; running streams keep the blocks they use."""
        await self._call(request, "reset_prefix_cache", after_restart=True)

    async def start_profile(self, request: ApiRequest) -> None:
        self._check_profiles()
        await self._call(request, "start_profile", after_restart=True)

    async def stop_profile(self, request: ApiRequest) -> None:
        """Engines that were restarted have lost their profile and are not asked again."""
        self._check_profiles()
        await self._call(request, "stop_profile", after_restart=False)

    async def abort_requests(self, request: ApiRequest) -> None:
        """End streams with what they have, whichever API server has them."""
        options = operation_options(request.http)
        body = self._decode_abort(await request.http.read_json(MAX_ABORT_BYTES))
        given: dict[str, Any] = {"ids": body.request_ids, "prefix": body.prefix, "all": body.all or None}
        arguments = {name: value for name, value in given.items() if value is not None}
        if len(arguments) != 1:
            raise ApiError(400, "Give one of request_ids, prefix, and all (true).", param="request_ids")
        # those of an engine that restarts go on at another one, which may have answered by then
        result = await call_engines(self._engine_client, "abort_streams", arguments, options)
        aborted = sum(receipt.result for receipt in result.receipts if receipt.error is None)
        await send_receipts(request, "abort_requests", options, result, aborted=aborted)

    async def _call(self, request: ApiRequest, name: str, *, after_restart: bool) -> None:
        options = await _options(request)
        result = await call_engines(self._engine_client, name, {}, options, after_restart=after_restart)
        await send_receipts(request, name, options, result)

    def _check_profiles(self) -> None:
        if not self._profiles:
            raise ApiError(
                400, "There is no directory for profiles: serve with --profile-dir.", code="no_profile_dir"
            )

    # -- desired states

    async def sleep(self, request: ApiRequest) -> None:
        options = await _options(request, "level", "mode")
        level, mode = options.parameters.get("level", "1"), _mode(options, MODES)
        if level not in ("1", "2"):
            raise refused_value("level", level, "1 or 2")
        value = {"level": int(level), "mode": mode}
        # no engine gives its memory back before all of them take no streams
        stages = [value | {"hold": True}, value]
        await self._set(request, options, SLEEP, f"sleep level={level} mode={mode}", stages)

    async def wake_up(self, request: ApiRequest) -> None:
        await self._set(request, await _options(request), SLEEP, "wake_up", [{"level": 0}])

    async def is_sleeping(self, request: ApiRequest) -> None:
        await request.http.reply_json(encode_json({"is_sleeping": self._engine_client.refusal() == SLEEPING}))

    async def pause(self, request: ApiRequest) -> None:
        options = await _options(request, "mode")
        mode = _mode(options, PAUSE_MODES)
        await self._set(request, options, PAUSE, f"pause mode={mode}", [{"paused": True, "mode": mode}])

    async def resume(self, request: ApiRequest) -> None:
        options = await _options(request)
        await self._set(request, options, PAUSE, "resume", [{"paused": False, "mode": MODES[0]}])

    async def is_paused(self, request: ApiRequest) -> None:
        paused = self._engine_client.states.is_pause_desired()
        await request.http.reply_json(encode_json({"is_paused": paused}))

    async def _set(
        self,
        request: ApiRequest,
        options: OperationOptions,
        state: str,
        asked: str,
        stages: list[dict[str, Any]],
    ) -> None:
        """Set a state. ``asked``: the operation and its parameters."""
        members_of(self._engine_client)
        result = await self._state_changes.change(state, options.key, asked, stages, options.timeout_s)
        await send_receipts(request, asked.split()[0], options, result)


async def _options(request: ApiRequest, *names: str) -> OperationOptions:
    """Of a request whose parameters may be in its body. Raises ApiError."""
    return operation_options(request.http, *names, body=await read_parameter_body(request.http))


def _mode(options: OperationOptions, allowed: tuple[str, ...]) -> str:
    """What becomes of streams that run. Raises ApiError."""
    mode = options.parameters.get("mode", allowed[0])
    if mode not in allowed:
        raise refused_value("mode", mode, f"{', '.join(allowed[:-1])} or {allowed[-1]}")
    return mode
