"""The interface of an API for vectors, scores or labels: how a body becomes a plan, and the reply's body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from penstock.generation.dialect import NO_INFO, RequestInfo
from penstock.generation.pooling.plan import PooledInputs, PoolingPlan
from penstock.http.errors import ApiError
from penstock.http.request import JSON
from penstock.http.sink import Headers


class PoolingBody(NamedTuple):
    """The body of a reply."""

    pieces: Iterator[bytes]
    """Each takes at most a millisecond to make."""
    kind: bytes = JSON
    """The content type."""
    size: int | None = None
    """Bytes of all pieces, if that is known before they are made; needed for another content type than
    JSON."""
    headers: Headers = ()
    """Of the reply, besides those that every reply has."""


class PoolingDialect(ABC):
    """One API for one served model."""

    path: ClassVar[str]
    """Path of the route; its method is POST."""

    @abstractmethod
    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        """Check a request body and make its plan. ``info.accept``: the request's headers. Raises ApiError."""

    @abstractmethod
    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        """The reply's body. ``request_id``: unique, for replies with an id. Raises ApiError."""

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        """The body of an error reply, by default in OpenAI's shape."""
        return error.body()
