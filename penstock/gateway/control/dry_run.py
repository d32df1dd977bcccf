"""``POST /admin/route``: what would become of a request, and why. Nothing is sent or remembered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.gateway.admission.intake import Intake
from penstock.gateway.control.endpoint_state import obstacles
from penstock.gateway.models.directory import ModelDirectory
from penstock.gateway.models.model_routes import ModelRoute
from penstock.gateway.requests.caller import ANYONE, Caller
from penstock.gateway.requests.generation_body import received_whole
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.model_steps import FallbackStep
from penstock.gateway.routing.pick_request import NoEndpointError, PickRequest, pick_request
from penstock.gateway.routing.router import Router
from penstock.http.body_errors import malformed, wrong_type
from penstock.http.errors import ApiError
from penstock.http.request import HttpRequest

ROUTE = "/admin/route"
Api = Literal["chat", "completions", "responses", "messages", "ollama", "embeddings"]
_APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": []}),
    "completions": ("/v1/completions", {"prompt": ""}),
    "responses": ("/v1/responses", {"input": ""}),
    "messages": ("/v1/messages", {"messages": []}),
    "ollama": ("/api/chat", {"messages": []}),
    "embeddings": ("/v1/embeddings", {"input": ""}),
}
"""Path and body of a request of which only the model is known."""


class _Asked(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One question. ``body``: that of the request; without it only its model is known."""

    model: Annotated[str, Meta(min_length=1)] | None = None
    api: Api = "chat"
    body: dict[str, Any] | None = None
    session: str | None = None
    key_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None
    """Whose request it is: the SHA-256 of the client's key."""


class DryRun:
    """Answers by what this worker knows, with the code that decides for requests."""

    def __init__(self, router: Router, directory: ModelDirectory, intake: Intake) -> None:
        self._router = router
        self._directory = directory
        self._intake = intake

    async def answer(self, http: HttpRequest) -> dict[str, Any]:
        """The reply to an administrator's request. Raises ApiError."""
        asked = _read(await http.read_json(self._intake.bodies.max_read))
        caller = ANYONE
        if asked.key_sha256 is not None:
            caller = self._intake.keys.find(bytes.fromhex(asked.key_sha256))
        report: dict[str, Any] = {"refused": None, "endpoint": None, "then": [], "steps": []}
        try:
            await self._explain(asked, caller, report)
        except ApiError as error:
            told = msgspec.json.decode(error.body())["error"]
            report["refused"] = {"status": error.status, "code": told["code"], "message": told["message"]}
        report["budgets"] = await self._router.admission.budgets.left(caller)
        return report

    async def _explain(self, asked: _Asked, caller: Caller, report: dict[str, Any]) -> None:
        """Add to the report what is decided, step by step. Raises ApiError for what would be refused."""
        incoming, record = await self._incoming(asked, caller)
        session = incoming.session or (None if incoming.body is None else incoming.body.session)
        model = incoming.model or ""
        name, route, target = self._directory.target(model, session)
        report["request"] = {
            "path": incoming.path,
            "model": model,
            "session": session,
            "client": caller.name,
            "priority": record.priority,
            "prompt_tokens": 0 if incoming.body is None else incoming.body.tokens,
        }
        report["name"] = _name(name, route, target, session)
        known: Sequence[Endpoint] = ()
        if (id := incoming.response) is not None:
            known = self._router.owners.of(id)
            report["stored_response"] = {"id": id, "known_at": [each.url for each in known]}
        steps: Sequence[FallbackStep]
        if known:
            steps = (self._directory.step_at(known, model, session),)
        else:
            steps = self._directory.steps_to(model, target, route)
        request = pick_request(incoming, session, steps, self._router.ttft_slo_s)
        request.client, request.record, request.owners = record.client, record, known or None
        try:
            ranked = self._router.preview(request, len(self._router.pool.endpoints) or 1)
            report["translated"] = await _translated(asked, incoming, ranked[0])
            report["endpoint"], report["then"] = ranked[0].url, [each.url for each in ranked[1:]]
        except NoEndpointError as refusal:
            raise refusal.as_error() from None
        finally:
            report["steps"] = [self._step(step, request) for step in steps]
            report["others"] = list(self._others(steps, model))
            report["flow_control"] = self._flow_control(request)

    async def _incoming(self, asked: _Asked, caller: Caller) -> tuple[IncomingRequest, RequestRecord]:
        path, empty = _APIS[asked.api]
        body = dict(empty) if asked.body is None else asked.body
        if asked.model is not None:
            body["model"] = asked.model
        record = RequestRecord(path, method="POST", caller=caller)
        incoming = self._intake.read(
            record,
            [],
            await received_whole(msgspec.json.encode(body)),
            session=asked.session,
            relayed_headers=[(b"content-type", b"application/json")],
            target=path.encode(),
        )
        return incoming, record

    def _step(self, step: FallbackStep, request: PickRequest) -> dict[str, Any]:
        now, holds = self._router.clock(), step is request.steps[0]
        scores = self._router.picker.scores(request, step.endpoints, now) if holds else {}
        limited = self._router.admission.flow is not None
        return {
            "model": step.model,
            "pools": step.pools,
            "holds": holds,
            "overflow": step.overflow,
            "overflows": request.owners is None and self._router.has_queue(request, step),
            "endpoints": [
                {
                    "endpoint": each.url,
                    "pool": each.pool,
                    "ready": each.is_ready(now),
                    "obstacles": self._obstacles(each, request, step.model, now),
                    "lists_model": each in step.listed,
                    "in_flight": each.in_flight,
                    "waiting": each.waiting(now),
                    "free_places": self._router.capacity.peek(each, now) if limited else None,
                    "score": None if (own := scores.get(each)) is None else own[0],
                    "scores": {} if own is None else own[1],
                }
                for each in step.endpoints
            ],
        }

    def _obstacles(self, endpoint: Endpoint, request: PickRequest, model: str, now: float) -> list[str]:
        found = obstacles(endpoint, now, request.client, model if endpoint.several_models else "")
        if request.subset is not None and endpoint.url not in request.subset:
            found.append(f"role {endpoint.role}: it computes prompts for others")
        if request.owners is not None and endpoint not in request.owners:
            found.append("it does not have the stored response")
        return found

    def _others(self, steps: Sequence[FallbackStep], model: str) -> Iterator[dict[str, str]]:
        """Endpoints that would not get the request, whatever fails."""
        named = {each for step in steps for each in step.endpoints}
        for endpoint in self._router.pool.endpoints:
            if endpoint not in named:
                listed = self._directory.listing(endpoint)
                why = "its pool neither serves the model nor stands in for one that does"
                if listed and model not in listed:
                    why = "it does not list the model"
                yield {"endpoint": endpoint.url, "pool": endpoint.pool, "why": why}

    def _flow_control(self, request: PickRequest) -> dict[str, Any] | None:
        """None: it is off, and nothing waits in the gateway."""
        router, flow = self._router, self._router.admission.flow
        if flow is None:
            return None
        now = router.clock()
        ready = [each for each in request.steps[0].endpoints if each.is_ready(now)]
        full = bool(ready) and all(router.capacity.peek(each, now) <= 0 for each in ready)
        return {"waiting": flow.waiting, "waiting_bytes": flow.waiting_bytes, "would_wait": full}


def _read(raw: bytes) -> _Asked:
    """Raises ApiError."""
    try:
        asked = msgspec.json.decode(raw, type=_Asked)
    except msgspec.ValidationError as error:
        raise wrong_type(raw, str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(raw, error) from None
    if asked.model is None and not (asked.body or {}).get("model"):
        raise ApiError(400, "model is missing: name one, or give a body that does.", param="model")
    return asked


async def _translated(asked: _Asked, incoming: IncomingRequest, endpoint: Endpoint) -> bool:
    """Whether the endpoint gets a request of another API. Raises ApiError for one that it cannot answer."""
    if endpoint.apis is None:
        return False
    from penstock.gateway.translation import translation  # with its dialects, and only where needed

    if not translation.is_translated(endpoint.apis, incoming):
        return False
    if asked.body is not None:
        await translation.translate(incoming, "")
    return True


def _name(name: str | None, route: ModelRoute | None, target: str, session: str | None) -> dict[str, Any]:
    """What the name stands for, and by which rule."""
    if route is None:
        return {"rule": None, "target": target, "chosen_by": "its own name"}
    chosen_by = "its own name"
    if route.targets:
        chosen_by = "the only target" if len(route.targets) == 1 else "weight"
        if chosen_by == "weight":
            chosen_by = "weight, by lot" if session is None else "weight, by the session"
    return {
        "rule": name,
        "targets": route.targets,
        "target": target,
        "chosen_by": chosen_by,
        "fallback": route.fallback,
        "shadow": route.shadow,
    }
