"""A complete request of a client, as the gateway routes and relays it."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from penstock.gateway.requests.body_rest import BodyRest
from penstock.gateway.requests.gemini_path import names_its_model, with_model
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
    """The body's bytes, but for its ``rest``."""
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

    @property
    def size(self) -> int:
        """Bytes of the body, as far as it is known."""
        return len(self.raw) + (0 if self.rest is None else self.rest.left or 0)

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
        body = self.body.with_model(model)
        return replace(self, model=model, raw=body.raw, body=body)

    def with_transfer(self, params: bytes) -> IncomingRequest:
        """Copy the request with ``kv_transfer_params`` (JSON), for an endpoint that fetches the KV cache of
        the prompt from another one."""
        assert self.body is not None, "only requests that generate have a prompt"
        body = self.body.with_transfer(params)
        return replace(self, raw=body.raw, body=body)

    @property
    def response(self) -> str | None:
        """Id of the stored response that the request is about, or continues."""
        return response_of(self.path, self.body)
