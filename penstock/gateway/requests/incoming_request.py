"""A complete request of a client, as the gateway routes and relays it."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from penstock.gateway.requests.body_rest import BodyRest
from penstock.gateway.requests.gemini_path import names_its_model, with_model
from penstock.gateway.requests.generation_body import CheckedRest
from penstock.gateway.requests.long_values import NO_VALUES, LongValues
from penstock.gateway.requests.model_field import replace_model
from penstock.gateway.requests.request_body import RequestBody, response_of
from penstock.gateway.upstream.exchange import Headers


class IncomingRequest(msgspec.Struct, frozen=True):
    """A request as the client sent it, with the headers that the endpoint gets."""

    method: str
    target: bytes
    """Path and query, as the client sent them."""
    path: str
    headers: Headers
    """End-to-end headers, see :func:`~penstock.gateway.upstream.exchange.without_hop_by_hop`."""
    raw: bytes
    """The body's bytes, but for its ``rest``; with marks for its ``values``. Of a body with a
    :class:`~penstock.gateway.requests.generation_body.CheckedRest` it is what routing reads, and not sent."""
    body: RequestBody | None
    """None when the request does not generate; only the model is read of its body."""
    model: str | None = None
    """The model that the body, or the path, names; empty: it generates, but names none; None: it concerns no
    model."""
    session: str | None = None
    subset: frozenset[str] | None = None
    """Addresses and ports of the endpoints that Envoy allows; None: all."""
    rest: BodyRest | None = None
    """What follows of the body; None: nothing."""
    values: LongValues = NO_VALUES
    """Long base64 of the body."""
    came: int | None = None
    """Bytes that the client has sent before the ``rest``; None: those of ``raw``."""

    @property
    def size(self) -> int:
        """Bytes of the body, as far as it is known."""
        came = len(self.raw) if self.came is None else self.came
        return came + (0 if self.rest is None else self.rest.left or 0)

    @property
    def is_changed(self) -> bool:
        """Whether the endpoint gets another model than its rest may name, which is not read yet."""
        return isinstance(self.rest, CheckedRest) and self.rest.model != self.model

    def allows(self, destination: str) -> bool:
        """Whether Envoy allows the endpoint with this address and port."""
        return self.subset is None or destination in self.subset

    def for_model(self, model: str) -> IncomingRequest:
        """Copy the request for another model. One that reads a model keeps the name in its path."""
        if self.model is None or model == self.model:
            return self
        if names_its_model(self.path):
            body = None if self.body is None else replace(self.body, model=model)
            return replace(self, model=model, body=body, target=with_model(self.target, model))
        if not self.raw:
            return replace(self, model=model)
        if self.body is None:
            raw = replace_model(self.headers, self.raw, model, partial=self.rest is not None)
            return replace(self, model=model, raw=raw)
        if isinstance(self.rest, CheckedRest):
            return replace(self, model=model, body=replace(self.body, model=model))
        body = self.body.with_model(model)
        return replace(self, model=model, raw=body.raw, body=body)

    def with_transfer(self, params: bytes) -> IncomingRequest:
        """Copy the request with ``kv_transfer_params`` (JSON), for an endpoint that fetches the KV cache of
        the prompt from another one."""
        assert self.body is not None, "only requests that generate have a prompt"
        body = self.body.with_transfer(params)
        return replace(self, raw=body.raw, body=body)

    async def whole(self) -> IncomingRequest:
        """The request with all of its body, of which the rest was not read yet. Raises ApiError,
        ClientGone."""
        rest = self.rest
        assert isinstance(rest, CheckedRest), "others are only relayed"
        assert self.model is not None, "it generates"
        held = await rest.hold()
        body = rest.check(held.text, held.values)
        came = replace(
            self, raw=held.text, body=body, rest=None, values=held.values, came=held.came, model=rest.model
        )
        return came.for_model(self.model)

    @property
    def response(self) -> str | None:
        """Id of the stored response that the request is about, or continues."""
        return response_of(self.path, self.body)
