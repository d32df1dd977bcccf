"""Where a request for a model may go: one model and its endpoints, then what takes their place."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.endpoint import Endpoint

if TYPE_CHECKING:
    from penstock.gateway.routing.pick_request import PickRequest


@dataclass(frozen=True, slots=True, eq=False)
class FallbackStep:
    """A model and the endpoints that may be sent a request for it. ``endpoints`` stays the same object as
    long as models and endpoints stay."""

    model: str
    endpoints: tuple[Endpoint, ...]
    listed: frozenset[Endpoint] = frozenset()
    """Endpoints of which it is known that they serve the model; the others may."""
    pools: tuple[str, ...] = ()
    """Pools that serve it, also those without an endpoint."""
    overflow: int | None = None
    """Requests that may wait at each of the endpoints before the next step takes some; None: any number."""


class FallbackChain(Protocol):
    """What the router asks about models."""

    @property
    def any_model(self) -> FallbackStep:
        """For requests that concern no model."""
        ...

    async def find_steps(self, asked: str, session: str | None) -> Sequence[FallbackStep]:
        """The steps for a request that names the model ``asked``, at least one. Raises ApiError."""
        ...

    def step_at(self, endpoints: Sequence[Endpoint], asked: str, session: str | None) -> FallbackStep:
        """For a request that only these endpoints can serve: the model that they serve under this name."""
        ...

    def copy(self, asked: str, session: str | None, request: PickRequest) -> None:
        """Send a copy of a request for the model ``asked`` elsewhere, if one is due. Does not wait."""
        ...

    def reply(self, record: RequestRecord, fields: Container[bytes]) -> bytes | None:
        """The body of the reply to a request for a listing of the models that its caller may use; None:
        endpoints answer it. ``fields``: the names of its headers. Raises ApiError."""
        ...

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left the pool."""
        ...

    def on_unknown_model(self, endpoint: Endpoint) -> None:
        """The endpoint did not know a model that it was sent a request for."""
        ...
