"""The routes that reach every server of a pool: ``POST /pause``, ``/update_weights`` and their like."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

import msgspec

from penstock.gateway.control.dry_run import DryRun
from penstock.gateway.control.endpoint_routes import EndpointRoutes
from penstock.gateway.control.fan_out import EndpointReceipt, FanOut
from penstock.gateway.models.directory import ModelDirectory
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.workers.control_calls import ControlCall, ControlEnd
from penstock.gateway.workers.shared_controls import KeeperSilent, SharedControls
from penstock.http.admission import unavailable
from penstock.http.errors import ApiError, encode_json, names_in_error, wrong_method
from penstock.http.operation_options import (
    idempotency_key,
    read_parameter_body,
    read_parameters,
    read_timeout,
)
from penstock.http.repeated_names import check_names
from penstock.http.request import HttpRequest
from penstock.wire.control import MAX_STATE_BYTES
from penstock.wire.messages import PAUSE, SLEEP, WEIGHTS

log = logging.getLogger(__name__)

EXTRA_S = 6.0
"""A server takes so much longer than its time-out at most, for a rollback."""
READ_S = 10.0
"""Time for what only reads."""
MAX_RUNNING = 64
"""Calls of this worker that run at the same time."""


class _Operation(NamedTuple):
    method: str
    state: str = ""
    """That it sets; empty: none."""
    active: bool = False


OPERATIONS = {
    "/pause": _Operation("POST", PAUSE, active=True),
    "/resume": _Operation("POST", PAUSE),
    "/sleep": _Operation("POST", SLEEP, active=True),
    "/wake_up": _Operation("POST", SLEEP),
    "/update_weights": _Operation("POST", WEIGHTS),
    "/abort_requests": _Operation("POST"),
    "/flush_cache": _Operation("POST"),
    "/reset_prefix_cache": _Operation("POST"),
    "/weights_checksum": _Operation("GET"),
    "/weight_version": _Operation("GET"),
    "/is_paused": _Operation("GET"),
    "/is_sleeping": _Operation("GET"),
}
_READING = frozenset({"/weight_version", "/is_paused", "/is_sleeping"})
"""Of these servers answer at once, without a key."""
_WITH_BODY = frozenset({"/update_weights", "/abort_requests"})
"""Of these the body is what they are for; of the others, parameters."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request."""

    path: str
    pool: str | None
    model: str
    key: str
    timeout_s: float
    target: str
    """For servers."""
    body: bytes
    parameters: dict[str, str]
    """Of the target."""
    fields: dict[str, Any]
    """Of the body."""


class ControlRoutes:
    """The handlers. A call goes on when its client leaves, or the worker drains."""

    def __init__(
        self,
        pool: EndpointPool,
        directory: ModelDirectory,
        fan_out: FanOut,
        controls: SharedControls,
        endpoints: EndpointRoutes,
        dry_run: DryRun,
    ) -> None:
        self.endpoints = endpoints
        """Operations on one endpoint."""
        self.dry_run = dry_run
        self._pool = pool
        self._directory = directory
        self._fan_out = fan_out
        self._controls = controls
        self._by_model: Mapping[tuple[str, str], tuple[Endpoint, ...]] = {}
        self._served: dict[tuple[str, str], frozenset[Endpoint]] = {}
        """The endpoints of ``_by_model``."""
        self._running: set[asyncio.Task[Any]] = set()
        controls.on_take_over = self._on_take_over

    async def answer(self, http: HttpRequest) -> None:
        """Answer a request for one of OPERATIONS by an administrator. Raises ApiError."""
        operation = OPERATIONS[http.path]
        if http.method != operation.method:
            raise wrong_method(http.path, http.method, (operation.method,))
        if len(self._running) >= MAX_RUNNING:
            raise unavailable(f"{MAX_RUNNING} calls run already.", "too_many_calls")
        body = b""
        if http.path in _WITH_BODY:
            body = await http.read_json(MAX_STATE_BYTES)
        elif operation.method == "POST":
            body = await read_parameter_body(http)
        asked = _read(http, body)
        asked = replace(asked, pool=self._pool_of(asked))
        work = self._set(asked, operation) if operation.state else self._ask(asked, operation, READ_S)
        status, reply = await asyncio.shield(self._start(work))
        await http.reply_json(reply, status)

    async def close(self) -> None:
        """Wait for the calls that run, for a moment: another worker takes over those that are not done."""
        if self._running:
            await asyncio.wait(self._running, timeout=READ_S)

    def is_meant(self, call: ControlCall, endpoint: Endpoint) -> bool:
        """Whether a call is for an endpoint."""
        if endpoint.upstream.hosted or (call.pool is not None and endpoint.pool != call.pool):
            return False
        if not call.model:
            return True
        if self._directory.by_model() is not self._by_model:
            self._by_model = self._directory.by_model()
            self._served = {key: frozenset(endpoints) for key, endpoints in self._by_model.items()}
        served = self._served.get((call.model, endpoint.pool), frozenset())
        return endpoint in served or self._directory.listing(endpoint) is None

    def closed(self, endpoint: Endpoint) -> str:
        """The state that was set through the gateway, and has the endpoint refuse streams unless somebody has
        opened it directly; empty: none."""
        closes = {call.state: call.closes for call in self._controls.calls if self.is_meant(call, endpoint)}
        return next((state for state, holds in closes.items() if holds and state not in endpoint.opened), "")

    # -- one call

    def _start(self, work: Coroutine[Any, Any, tuple[int, bytes]]) -> asyncio.Task[tuple[int, bytes]]:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _ask(self, asked: _Asked, operation: _Operation, least_s: float) -> tuple[int, bytes]:
        """An operation that sets no state."""
        timeout_s = READ_S if asked.path in _READING else max(least_s, asked.timeout_s + EXTRA_S)
        key = "" if asked.path in _READING else asked.key
        endpoints = self._endpoints(asked.pool, asked.model)
        receipts = await self._fan_out.ask_all(
            endpoints, operation.method, asked.target, asked.body, key, timeout_s
        )
        return _reply(asked, receipts, _sums(asked.path, receipts))

    async def _set(self, asked: _Asked, operation: _Operation) -> tuple[int, bytes]:
        """An operation that sets a state."""
        whole = asked.fields.get("whole")
        version = asked.fields.get("weight_version")
        call = ControlCall(
            state=operation.state,
            pool=asked.pool,
            model=asked.model,
            key=asked.key,
            target=asked.target,
            body=asked.body,
            version=version if isinstance(version, str) else "",
            active=operation.active,
            whole=asked.fields.get("tensors") is None if whole is None else bool(whole),
            closes=operation.active and asked.parameters.get("mode") != "keep",
        )
        try:
            refusal = await self._controls.begin(call)
        except KeeperSilent:
            raise unavailable("The keeper of what the workers share is silent.", "undecided") from None
        if refusal:
            return _conflict(asked, refusal)
        known = next((each.digests for each in self._controls.calls if each.key == call.key), ())
        call = msgspec.structs.replace(call, digests=known)
        receipts, settled = await self._carry_out(call, asked.timeout_s + EXTRA_S)
        return _reply(asked, receipts, {"settled": settled})

    async def _carry_out(self, call: ControlCall, timeout_s: float) -> tuple[list[EndpointReceipt], bool]:
        """Send a call to its servers, and tell the keeper. Returns the receipts, and whether it holds."""
        try:
            endpoints = self._endpoints(call.pool, call.model)
            receipts = await self._fan_out.ask_all(
                endpoints, "POST", call.target, call.later_body, call.key, timeout_s
            )
            settled = any(each.has_run for each in receipts)
        except asyncio.CancelledError:  # this worker ends: another one goes on
            raise
        except BaseException:
            self._controls.end(ControlEnd(call, settled=False, missed=[]))
            raise
        missed = [each.endpoint for each in receipts if each.outcome not in ("done", "unsupported")]
        digests = next((each.digests for each in receipts if each.digests), call.digests)
        end = ControlEnd(msgspec.structs.replace(call, digests=digests), settled, missed)
        if settled:
            await self._controls.settle(end)
        else:
            self._controls.end(end)
        return receipts, settled

    def _on_take_over(self, call: ControlCall) -> None:
        log.warning("a worker has ended that had begun %s; this one goes on with it", call.target)
        self._start(self._go_on(call))

    async def _go_on(self, call: ControlCall) -> tuple[int, bytes]:
        with contextlib.suppress(ApiError):
            await self._carry_out(call, _timeout_in(call.target) + EXTRA_S)
        return 200, b""

    # -- whom it is for

    def _endpoints(self, pool: str | None, model: str) -> list[Endpoint]:
        """Raises ApiError if there are none."""
        scope = ControlCall("", pool, model, "", "", b"")
        found = [each for each in self._pool.endpoints if self.is_meant(scope, each)]
        if not found:
            raise unavailable("There is no model server.", "no_endpoint")
        return found

    def _pool_of(self, asked: _Asked) -> str | None:
        """The pool that a request is for; None: all. Raises ApiError for a name that nobody has, and without
        one where there is a choice."""
        directory = self._directory
        endpoints = [each for each in self._pool.endpoints if not each.upstream.hosted]
        pools = sorted({each.pool for each in endpoints})
        if asked.pool is not None and asked.pool not in pools:
            named = names_in_error(filter(None, pools))
            told = f"the pools are {named}" if named else "there are no pools"
            raise ApiError(400, f"pool {asked.pool!r}: {told}.", param="pool")
        models = sorted({name for name, _ in directory.by_model() if name})
        if asked.model and asked.model not in models:
            raise ApiError(
                400, f"model {asked.model!r}: the models are {names_in_error(models)}.", param="model"
            )
        if asked.model and asked.pool is not None:
            scope = ControlCall("", asked.pool, asked.model, "", "", b"")
            if not any(self.is_meant(scope, each) for each in endpoints):
                own = sorted(name for name, pool in directory.by_model() if name and pool == asked.pool)
                message = f"model {asked.model!r}: those of pool {asked.pool!r} are {names_in_error(own)}."
                raise ApiError(400, message, param="model")
        if asked.model or asked.pool is not None:
            return asked.pool
        if len(pools) > 1:
            raise ApiError(
                400, f"Name a model or a pool: the pools are {names_in_error(pools)}.", param="model"
            )
        bases = {_base_models(directory, each) for each in endpoints} - {frozenset[str]()}
        if len(bases) > 1:
            raise ApiError(400, f"Name a model: there are several, {names_in_error(models)}.", param="model")
        return pools[0] if pools else None


def _base_models(directory: ModelDirectory, endpoint: Endpoint) -> frozenset[str]:
    """What it lists, without adapters."""
    cards = directory.listing(endpoint) or {}
    return frozenset(name for name, card in cards.items() if not card.get("parent"))


# -- requests


def _read(http: HttpRequest, body: bytes) -> _Asked:
    """Raises ApiError."""
    if http.path not in _WITH_BODY:  # to servers all parameters go in the query, which others read, too
        given, body = read_parameters(http, body), b""
    else:
        given = read_parameters(http)
    fields: dict[str, Any] = {}
    if body:
        try:
            decoded = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(400, f"The body is no JSON: {error}") from None
        if not isinstance(decoded, dict):
            raise ApiError(400, "The body must be a JSON object.")
        check_names(body)
        fields = decoded
    for field in ("broadcast", "update_info"):
        if fields.get(field) is not None:
            message = f"{field}: it reaches one server, and cannot be sent again: call that server."
            raise ApiError(400, message, param=field)
    timeout_s = read_timeout(given.get("timeout"))
    model, pool = given.pop("model", ""), given.pop("pool", None)
    if "model" in fields:
        named = fields.pop("model")
        if not isinstance(named, str) or (model and named != model):
            raise ApiError(
                400, f"model is {named!r}: it must be a name, and the same everywhere.", param="model"
            )
        model, body = named, msgspec.json.encode(fields)
    query = urlencode(given)
    target = f"{http.path}?{query}" if query else http.path
    return _Asked(http.path, pool, model, idempotency_key(http), timeout_s, target, body, given, fields)


def _timeout_in(target: str) -> float:
    return read_timeout(dict(parse_qsl(target.partition("?")[2])).get("timeout"))


# -- replies


def _conflict(asked: _Asked, refusal: str) -> tuple[int, bytes]:
    error = ApiError(409, f"{asked.path[1:]}: conflict. {refusal}", code="conflict")
    body = {
        "operation": asked.path[1:],
        "key": asked.key,
        "outcome": "conflict",
        "settled": False,
        "endpoints": [],
    }
    return 409, encode_json(body | msgspec.json.decode(error.body()))


def _reply(asked: _Asked, receipts: Sequence[EndpointReceipt], more: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body over all servers."""
    outcome, status = _overall(receipts)
    body: dict[str, Any] = {
        "operation": asked.path[1:],
        "key": asked.key,
        "outcome": outcome,
        **more,
        "failed": [each.endpoint for each in receipts if each.outcome not in ("done", "unsupported")],
        "unsupported": [each.endpoint for each in receipts if each.outcome == "unsupported"],
        "endpoints": receipts,
    }
    if outcome != "done":
        told = "; ".join(f"{each.endpoint}: {each.error}" for each in receipts if each.error is not None)
        error = ApiError(status, f"{asked.path[1:]}: {outcome}. {told}", code=outcome)
        body |= msgspec.json.decode(error.body())
    return status, encode_json(body)


def _overall(receipts: Sequence[EndpointReceipt]) -> tuple[str, int]:
    """Outcome and status over all servers."""
    able = [each for each in receipts if each.outcome != "unsupported"]
    failed = [each for each in able if each.outcome != "done"]
    if not able:
        return "unsupported", 501
    if not failed:
        return "done", 200
    late = 504 if all(each.is_late for each in failed) else 502
    if len(failed) < len(able):
        return "partial", late
    outcomes = {each.outcome for each in failed}
    if outcomes == {"conflict"}:
        return "conflict", 409
    if outcomes == {"refused"} and len(statuses := {each.status for each in failed}) == 1:
        status = statuses.pop() or 502
        return "refused", status if status < 500 and status not in (401, 403) else 502
    if len(outcomes) == 1 and outcomes <= {"aborted", "undecided"}:
        return outcomes.pop(), late
    return "partial", late


class _EngineResult(msgspec.Struct):
    result: Any = None


def _sums(path: str, receipts: Sequence[EndpointReceipt]) -> dict[str, Any]:
    """What is told of all engines together."""
    if path not in ("/abort_requests", "/weights_checksum"):
        return {}
    results = [
        engine.result
        for each in receipts
        if isinstance(each.engines, msgspec.Raw)
        for engine in msgspec.json.decode(each.engines, type=list[_EngineResult])
    ]
    if path == "/abort_requests":
        return {"aborted": sum(result for result in results if isinstance(result, int))}
    return {"equal": len({str(result) for result in results}) == 1}
