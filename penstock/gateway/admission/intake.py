"""The way of every request into the gateway: who may send it, what is relayed, what its body says.

The gateway's own clients and Envoy's take the same way, so that neither gets what the other is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial

import msgspec

from penstock.gateway.admission.client_keys import ClientKeys
from penstock.gateway.requests.apis import VECTOR_APIS
from penstock.gateway.requests.body_rest import BodyLimits, ReceivedBody
from penstock.gateway.requests.bounded_name import bounded_name
from penstock.gateway.requests.caller import Caller
from penstock.gateway.requests.gemini_path import model_in, names_its_model
from penstock.gateway.requests.generation_body import MODEL_HEADER, CheckedRest
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.requests.long_values import NO_VALUES, LongValues
from penstock.gateway.requests.model_field import (
    described_model,
    named_beside,
    other_model_field,
    read_model,
)
from penstock.gateway.requests.relayed_routes import RelayedRoutes
from penstock.gateway.requests.request_body import GENERATION_PATHS, RequestBody, read_request
from penstock.gateway.requests.sessions import session_named
from penstock.gateway.requests.unread_routes import check_unread
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.upstream.exchange import Headers, without_hop_by_hop
from penstock.http.errors import ApiError, shown
from penstock.http.request import first_values

OBJECTIVE_HEADERS = frozenset({b"x-gateway-inference-objective", b"x-llm-d-inference-objective"})
"""Headers that name an InferenceObjective, of the Gateway API Inference Extension and of llm-d."""
UNCODED = (b"accept-encoding", b"identity")
"""The header with which endpoints do not compress what the gateway reads. Without it they might (RFC 9110
§12.5.3)."""


_of_address = lru_cache(maxsize=1024)(Caller)
"""A client without a key; the object takes longer to make than to find."""


@dataclass(frozen=True, slots=True)
class Intake:
    """What requests have to pass, for all requests of a gateway."""

    keys: ClientKeys
    routes: RelayedRoutes
    session_header: bytes
    """Name of the header of ``--session-header``, in lower case."""
    bodies: BodyLimits
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Priority by name of objective; requests name theirs in :data:`OBJECTIVE_HEADERS`."""
    relays_kv_transfer: bool = False
    """Clients may say from which hosts a KV cache is fetched."""

    async def authorize(self, record: RequestRecord, headers: Mapping[bytes, bytes], address: str) -> None:
        """Check the key and the route of a request; ``headers`` are by name in lower case. The record says
        from then on who sends it, also if it is refused: the client of the key, or one known by its
        ``address`` alone. Raises ApiError."""
        caller = await self.keys.checked(record.path, headers)
        record.caller = caller if caller is not None and caller.id else _of_address(address)
        self.routes.check_route(record.method, record.path)
        if caller is not None:
            check_unread(caller, record.method, record.path)

    @staticmethod
    def generates(method: str, path: str) -> bool:
        """Whether the body of the request is read."""
        return method == "POST" and path in GENERATION_PATHS

    def read(
        self,
        record: RequestRecord,
        headers: Headers,
        received: ReceivedBody | None,
        *,
        session: str | None,
        relayed_headers: Headers,
        target: bytes,
        subset: frozenset[str] | None = None,
    ) -> IncomingRequest:
        """The request of ``record`` with these ``headers`` and the body ``received``; None: it is not known.
        Endpoints get ``relayed_headers``; ``session``: that of :meth:`session_in`. Raises ApiError."""
        raw = None if received is None else received.text
        rest = None if received is None else received.rest
        values = NO_VALUES if received is None else received.values
        record.bytes_in = came = 0 if received is None else received.size
        body, model = None, None
        if raw is not None and self.generates(record.method, record.path):
            body = self._read_body(record, raw, target, values)
            if isinstance(rest, CheckedRest):
                body = msgspec.structs.replace(body, model=rest.model)
                rest.check = partial(self._check_rest, record, target, rest.model)
            priority = self._priority(record.caller, body.priority, headers)
            if priority != body.priority:
                body = msgspec.structs.replace(body, priority=priority)
            record.set_body(body)
            model = body.model
        else:
            if names_its_model(record.path):
                model = model_in(target)
            elif raw and record.method == "POST":
                model = self._read_model(record, relayed_headers, raw, partial=rest is not None)
            else:
                model = described_model(record.method, record.path)
            if self.reads_reply(record.method, record.path):
                record.priority = self._priority(record.caller, 0, headers)
            if model is not None:
                record.model = record.target_model = bounded_name(model)
        self._check_model(record, model, relayed_headers, raw or b"", target)
        return IncomingRequest(
            method=record.method,
            target=target,
            path=record.path,
            headers=relayed_headers,
            raw=raw or b"",
            body=body,
            model=model,
            session=session,
            subset=subset,
            rest=rest,
            values=values,
            came=came,
        )

    def _check_rest(
        self, record: RequestRecord, target: bytes, model: str, raw: bytes, values: LongValues
    ) -> RequestBody:
        """Read the whole body of a request that was routed by its beginning, for ``model``. Raises
        ApiError."""
        body = self._read_body(record, raw, target, values)
        if body.model != model:
            record.reason = "bad_body"
            said, header = shown(body.model), MODEL_HEADER.decode()
            text = f"model is {said!r}, and the header {header!r} has {shown(model)!r}."
            raise ApiError(400, text, param="model")
        record.streamed = body.stream
        return body

    def _read_body(self, record: RequestRecord, raw: bytes, target: bytes, values: LongValues) -> RequestBody:
        """Raises ApiError."""
        try:
            body = read_request(raw, record.path, target, values)
            self._check_transfer(body.transfer_field)
        except ApiError:
            record.reason = "bad_body"
            raise
        return body

    @staticmethod
    def _read_model(record: RequestRecord, headers: Headers, raw: bytes, *, partial: bool) -> str | None:
        """Raises ApiError."""
        try:
            return read_model(headers, raw, partial=partial)
        except ApiError:
            record.reason = "bad_body"
            raise

    def _priority(self, caller: Caller, asked: int, headers: Headers) -> int:
        """The priority of the objective that the headers name, or that the request asks for, as far as its
        caller may."""
        if self.priorities:
            for name, value in headers:
                if name in OBJECTIVE_HEADERS:
                    priority = self.priorities.get(value.decode("latin-1"))
                    if priority is not None:
                        return priority if caller.priority is None else min(priority, caller.priority)
        return caller.priority_of(asked)

    def _check_transfer(self, field: str | None) -> None:
        """Raises ApiError."""
        if field is not None and not self.relays_kv_transfer:
            raise ApiError(
                400,
                f"{field} is not allowed: it has a model server fetch KV caches from hosts that the client "
                "names. A router in front of this gateway may set it with --allow-kv-transfer-params.",
                param=field,
            )

    @staticmethod
    def _check_model(
        record: RequestRecord, model: str | None, headers: Headers, raw: bytes, target: bytes
    ) -> None:
        """Refuse a model that the key is not for. ``model``: that of the body ``raw``; None: unknown. Raises
        ApiError."""
        caller = record.caller
        if not caller.models or record.method != "POST":
            return
        if not caller.may_use(model or ""):
            what = f"the model {shown(model)!r}" if model else "a request that names no model"
        elif (field := other_model_field(headers, raw) or named_beside(target, headers)) is not None:
            what = f"requests with {field}, which may choose another model"
        else:
            return
        raise ApiError(
            403,
            f"The key {caller.name!r} is not for {what}; it is for {', '.join(caller.models)}.",
            param="model",
            code="model_not_allowed",
        )

    def session_in(self, headers: Headers) -> str | None:
        """The value of ``--session-header``, or of a header that agents send. Raises ApiError."""
        name = self.session_header
        if sum(each == name for each, _ in headers) > 1:
            raise ApiError(400, f"The header {name.decode()!r} is given more than once.", code="bad_header")
        return session_named(first_values(headers), name)

    @staticmethod
    def reads_reply(method: str, path: str) -> bool:
        """Whether the gateway reads the reply, if only for its usage."""
        return method == "POST" and (path in GENERATION_PATHS or path in VECTOR_APIS)

    def relayed_headers(self, headers: Headers, *, reads_reply: bool) -> Headers:
        """The headers of a request that endpoints get: without those of the connection. Keys and whatever
        else depends on the endpoint follow on its connection. ``reads_reply``: see :meth:`reads_reply`."""
        kept = without_hop_by_hop(headers)
        if reads_reply:
            kept = [header for header in kept if header[0] != UNCODED[0]]
            kept.append(UNCODED)
        return kept
