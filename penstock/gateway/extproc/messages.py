"""Messages from and to Envoy as plain data, without protobuf or gRPC."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from penstock.gateway.upstream.exchange import Headers

Texts = dict[str, list[str]]
"""Lists of strings in one metadata namespace, by key; a string is split at commas."""


class MalformedMessageError(ValueError):
    """The peer sent what is no message, or one out of order."""


class MessagePart(enum.StrEnum):
    """Part of a request or reply; the values are the field names in both messages."""

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"


class BodyMode(enum.IntEnum):
    """How Envoy sends a body; the values are those of ``ProcessingMode.BodySendMode``."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


@dataclass(slots=True)
class ProcessingRequest:
    """One ``ProcessingRequest``."""

    part: MessagePart
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    end: bool = False
    """Nothing follows in this direction."""
    metadata: dict[str, Texts] = field(default_factory=dict)
    """Dynamic metadata by namespace."""
    attributes: dict[str, str] = field(default_factory=dict)
    observing: bool = False
    """Envoy expects no answers (``observability_mode``)."""
    request_mode: BodyMode | None = None
    response_mode: BodyMode | None = None
    """Sent with the first message, by Envoy versions that send it."""


@dataclass(slots=True)
class CommonResponse:
    """A ``ProcessingResponse`` that lets the request or reply continue."""

    part: MessagePart
    set_headers: Headers = field(default_factory=list)
    remove_headers: tuple[str, ...] = ()
    body: bytes | None = None
    """Replaces the buffered body."""
    chunk: bytes | None = None
    """Part of a full-duplex body to forward."""
    end: bool = False
    """``chunk`` is the last one of a full-duplex body."""
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    """Dynamic metadata to set, by namespace."""


@dataclass(slots=True)
class ImmediateResponse:
    """A ``ProcessingResponse`` that answers the client."""

    status: int
    headers: Headers
    body: bytes
    details: str
    """Envoy's access log shows it as ``response_code_details``."""


ProcessingResponse = CommonResponse | ImmediateResponse


@dataclass(slots=True)
class AccessLogEntry:
    """One ``HTTPAccessLogEntry``: how a request ended, in Envoy's terms. Durations are in seconds."""

    request_id: str
    path: str = ""
    status: int = 0
    """Status that the client got; 0: none."""
    details: str = ""
    flags: frozenset[str] = frozenset()
    """Names of the ``ResponseFlags`` that are set."""
    upstream: str = ""
    """Address and port of the last server that the request was sent to; empty: none."""
    attempts: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    duration_s: float = 0.0
    first_byte_s: float | None = None
    """Time to the first byte from upstream."""
    metadata: dict[str, Texts] = field(default_factory=dict)
