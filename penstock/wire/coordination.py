"""Messages between the coordinator and its members, the engines and API servers.

Members connect and join; engines report what they have to do, API servers are told that, and where engines
of other hosts are. Typed, array-like msgpack with append-only fields, as :mod:`penstock.wire.messages`. A
message is one part.

A coordinator that was restarted knows nobody: it answers whatever it gets from a stranger with
:class:`Rejoin`, and the member joins again.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from penstock.wire.messages import Count, Incarnation, WireError, decoded

COORDINATOR_PROTOCOL_VERSION = 1


class JoinRejectedError(Exception):
    """The fleet does not take this engine, and would not the next time. The message says why."""


# -- member → coordinator


class EngineJoin(msgspec.Struct, array_like=True, frozen=True, tag=1, gc=False):
    """First message of an engine, answered by JoinAccepted or JoinRejected; ``epoch`` counts its restarts.
    Sent again every second, as a sign of life."""

    protocol: int
    rank: Count
    epoch: Count
    incarnation: Incarnation = 0
    address: str = ""
    """Where API servers reach it; empty when they know."""
    traits: dict[str, str] = {}
    """What engines of one fleet must have in common, by name: of these none may differ."""


class ServerJoin(msgspec.Struct, array_like=True, frozen=True, tag=2, gc=False):
    """First message of an API server, answered by JoinAccepted and all news. Sent again every second, so
    that a coordinator that was restarted soon knows whom to tell."""

    protocol: int
    server: Count
    epoch: Count
    incarnation: Incarnation = 0


class EngineReport(msgspec.Struct, array_like=True, frozen=True, tag=3, gc=False):
    """What an engine has to do. Sent on change, at most every 100 ms while it is busy."""

    step: Annotated[int, Meta(ge=0)]
    """Frames published before: orders this report among the token frames of the engine."""
    waiting: Count
    running: Count
    kv_used_permille: Annotated[int, Meta(ge=0, le=1000)]
    accepted: list[Count]
    """Flat (API server, Submits taken from its connection) pairs."""


class MemberLeave(msgspec.Struct, array_like=True, frozen=True, tag=4, gc=False):
    """The member ends."""


class ProcessMetrics(msgspec.Struct, array_like=True, frozen=True, tag=5, gc=False):
    """What a process has counted, by way of the coordinator from one API server to all others.

    API servers send their own once a second, and the last ones of processes that have ended.
    """

    process: str
    epoch: Count
    sequence: Annotated[int, Meta(ge=0)]
    snapshot: bytes
    """Encoded, see :mod:`penstock.metrics.snapshot`."""
    incarnation: Incarnation = 0


# -- coordinator → member


class JoinAccepted(msgspec.Struct, array_like=True, frozen=True, tag=19, gc=False):
    """The receiver is a member from here on. An API server tells what it knows of processes that have ended:
    the coordinator may be new."""


class EngineLoad(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One engine's latest report, as told to one API server."""

    rank: Count
    epoch: Count
    step: Annotated[int, Meta(ge=0)]
    waiting: Count
    running: Count
    kv_used_permille: Annotated[int, Meta(ge=0, le=1000)]
    accepted: Count
    """Submits the engine has taken from this API server."""
    incarnation: Incarnation = 0


class FleetLoad(msgspec.Struct, array_like=True, frozen=True, tag=16, gc=False):
    """The engines whose report changed since the last FleetLoad to this API server."""

    engines: list[EngineLoad]


class Rejoin(msgspec.Struct, array_like=True, frozen=True, tag=17, gc=False):
    """The sender does not know the receiver, which has to join (again)."""


class JoinRejected(msgspec.Struct, array_like=True, frozen=True, tag=18, gc=False):
    """The join is refused; the member must not try again."""

    reason: str


class EngineAddress(msgspec.Struct, array_like=True, frozen=True, tag=20, gc=False):
    """Where API servers reach the engine of a rank that is not on their host."""

    rank: Count
    epoch: Count
    incarnation: Incarnation
    address: str
    """Empty: it has left."""


FromMember: TypeAlias = EngineJoin | ServerJoin | EngineReport | MemberLeave | ProcessMetrics
FromCoordinator: TypeAlias = FleetLoad | Rejoin | JoinRejected | JoinAccepted | ProcessMetrics | EngineAddress

_from_member: msgspec.msgpack.Decoder[FromMember] = msgspec.msgpack.Decoder(FromMember)
_from_coordinator: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(FromCoordinator)


def decode_from_member(part: bytes) -> FromMember:
    """Raises WireError."""
    message = decoded(_from_member, part, "to a coordinator")
    if isinstance(message, EngineReport) and len(message.accepted) % 2:
        raise WireError(f"EngineReport.accepted has {len(message.accepted)} numbers, not pairs")
    return message


def decode_from_coordinator(part: bytes) -> FromCoordinator:
    """Raises WireError."""
    return decoded(_from_coordinator, part, "of a coordinator")
