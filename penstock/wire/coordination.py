"""Messages between the coordinator and its members, which are the engines and API servers.

==============  ===========  ===========  ======================================================
message         sender       receiver     answer
==============  ===========  ===========  ======================================================
EngineJoin      engine       coordinator  JoinAccepted or JoinRejected
ServerJoin      API server   coordinator  JoinAccepted, FleetLoad, EngineAddress; or JoinRejected
EngineReport    engine       coordinator  none; FleetLoad to the API servers
MemberLeave     member       coordinator  none
ProcessMetrics  API server   coordinator  none; forwarded to all other API servers
MetricsQuery    API server   coordinator  what it lacks of all that is forwarded, then MetricsAnswer
MetricsSent     API server   coordinator  none
MetricsRequest  coordinator  API server   ProcessMetrics, then MetricsSent
JoinAccepted    coordinator  member       of an API server ProcessMetrics of ended processes
JoinRejected    coordinator  member       none; the member does not try again
Rejoin          coordinator  member       EngineJoin or ServerJoin
FleetLoad       coordinator  API server   none
EngineAddress   coordinator  API server   none
MetricsAnswer   coordinator  API server   none
==============  ===========  ===========  ======================================================

Typed, array-like msgpack with append-only fields, as :mod:`penstock.wire.messages`. A message is one part.
A restarted coordinator has no members: it answers any message of an unknown peer with :class:`Rejoin`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from penstock.wire.decoding import decoded
from penstock.wire.messages import (
    Count,
    Incarnation,
    WireError,
)
from penstock.wire.parts import Part
from penstock.wire.sockets import engine_identity, is_ip_address, server_identity

COORDINATOR_PROTOCOL_VERSION = 4

MAX_SNAPSHOT_BYTES = 1 << 18
"""Maximum size of ProcessMetrics.snapshot; that of an engine has about 5 kB."""
MAX_MEMBER_BYTES = MAX_SNAPSHOT_BYTES + 1024
"""Maximum size of a member's message."""
MAX_TRAITS = 64
ENGINE_TRAITS = ("max_model_len", "vocab_size", "dtype")
"""Names of the traits that an engine knows once it has started."""
BUILD = "build"
"""Name of the trait that is the process's build, see :func:`penstock.distribution.build_id`."""
MAX_ACCEPTED = 2 * 1024
"""Maximum numbers in EngineReport.accepted."""
ProcessName: TypeAlias = Annotated[str, Meta(max_length=64)]
Address: TypeAlias = Annotated[str, Meta(max_length=128)]
Trait: TypeAlias = Annotated[str, Meta(max_length=1024)]


class JoinRejectedError(Exception):
    """The coordinator rejected this engine for good. The message says why."""


# -- member → coordinator


class EngineJoin(msgspec.Struct, array_like=True, frozen=True, tag=1, gc=False):
    """First message of an engine; ``epoch`` counts its restarts. Repeated every second as a heartbeat."""

    protocol: int
    rank: Count
    epoch: Count
    incarnation: Incarnation = 0
    address: Address = ""
    """Address for API servers; empty for an engine on their host, whose address they know."""
    traits: Annotated[dict[Trait, Trait], Meta(max_length=MAX_TRAITS)] = {}
    """Properties that must be equal in all engines of a fleet, by name: the head's, and ENGINE_TRAITS."""


class ServerJoin(msgspec.Struct, array_like=True, frozen=True, tag=2, gc=False):
    """First message of an API server. Repeated every second, so that a restarted coordinator soon knows
    its members."""

    protocol: int
    server: Count
    epoch: Count
    incarnation: Incarnation = 0
    build: Trait = ""
    """The release of an API server of a fleet of several hosts."""


class EngineReport(msgspec.Struct, array_like=True, frozen=True, tag=3, gc=False):
    """An engine's load. Sent on change, at most every 100 ms while it is busy."""

    step: Annotated[int, Meta(ge=0)]
    """Token frames published so far: orders this report among the frames."""
    waiting: Count
    running: Count
    kv_used: Annotated[float, Meta(ge=0, le=1)]
    """Fraction of the KV cache in use."""
    accepted: Annotated[list[Count], Meta(max_length=MAX_ACCEPTED)]
    """Flat pairs: API server, and Submits taken from its connection."""


class MemberLeave(msgspec.Struct, array_like=True, frozen=True, tag=4, gc=False):
    """The member exits."""


class ProcessMetrics(msgspec.Struct, array_like=True, frozen=True, tag=5, gc=False):
    """Metrics of a process, forwarded by the coordinator from one API server to all others.

    API servers send their own once a second, and the final ones of engines that have ended.
    """

    process: ProcessName
    epoch: Count
    sequence: Annotated[int, Meta(ge=0)]
    snapshot: Annotated[bytes, Meta(max_length=MAX_SNAPSHOT_BYTES)]
    """An encoded :class:`penstock.metrics.snapshot.Snapshot`."""
    incarnation: Incarnation = 0


class MetricsQuery(msgspec.Struct, array_like=True, frozen=True, tag=6, gc=False):
    """The API server is about to show metrics, which it has sent before this."""

    number: Count
    fresh: bool = False
    """Whether the other API servers are asked for their metrics before the answer."""


class MetricsSent(msgspec.Struct, array_like=True, frozen=True, tag=7, gc=False):
    """The API server has sent its metrics, as the MetricsRequest of this number asks."""

    number: Count


# -- coordinator → member


class JoinAccepted(msgspec.Struct, array_like=True, frozen=True, tag=19, gc=False):
    """The receiver is a member from here on. An API server sends the metrics of ended processes that it
    has: the coordinator may be new."""

    incarnation: Incarnation = 0
    """The head's, which its API servers share."""


class EngineLoad(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One engine's latest EngineReport, as sent to one API server."""

    rank: Count
    epoch: Count
    step: Annotated[int, Meta(ge=0)]
    waiting: Count
    running: Count
    kv_used: Annotated[float, Meta(ge=0, le=1)]
    """Fraction of the KV cache in use."""
    accepted: Count
    """Submits that the engine has taken from this API server."""
    incarnation: Incarnation = 0


class FleetLoad(msgspec.Struct, array_like=True, frozen=True, tag=16, gc=False):
    """The engines whose load changed since the last FleetLoad to this API server."""

    engines: list[EngineLoad]


class Rejoin(msgspec.Struct, array_like=True, frozen=True, tag=17, gc=False):
    """The receiver is no member and must join (again)."""


class JoinRejected(msgspec.Struct, array_like=True, frozen=True, tag=18, gc=False):
    """The join is rejected; the member must not try again."""

    reason: str


class EngineAddress(msgspec.Struct, array_like=True, frozen=True, tag=20, gc=False):
    """Address of an engine on another host than the API servers."""

    rank: Count
    epoch: Count
    incarnation: Incarnation
    address: Address
    """Empty: the engine has left."""


class MetricsAnswer(msgspec.Struct, array_like=True, frozen=True, tag=21, gc=False):
    """The API server has all metrics that were shown before its query; of API servers that answer in time,
    after a fresh query, also those of the time of the query."""

    number: Count
    """Number of the query."""


class MetricsRequest(msgspec.Struct, array_like=True, frozen=True, tag=22, gc=False):
    """Another API server is about to show metrics, and wants this one's."""

    number: Count


FromMember: TypeAlias = (
    EngineJoin | ServerJoin | EngineReport | MemberLeave | ProcessMetrics | MetricsQuery | MetricsSent
)
FromCoordinator: TypeAlias = (
    FleetLoad
    | Rejoin
    | JoinRejected
    | JoinAccepted
    | ProcessMetrics
    | EngineAddress
    | MetricsAnswer
    | MetricsRequest
)

_from_member: msgspec.msgpack.Decoder[FromMember] = msgspec.msgpack.Decoder(FromMember)
_from_coordinator: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(FromCoordinator)


def decode_from_member(part: Part) -> FromMember:
    """Raises WireError, also for fields out of bounds."""
    if len(part) > MAX_MEMBER_BYTES:
        raise WireError(f"a message of {len(part)} bytes, at most {MAX_MEMBER_BYTES} are taken")
    message = decoded(_from_member, part, "to a coordinator")
    if isinstance(message, EngineReport) and len(message.accepted) % 2:
        raise WireError(f"EngineReport.accepted has {len(message.accepted)} numbers, not pairs")
    if isinstance(message, EngineJoin) and message.address:
        _check_address("EngineJoin", message.address)
    return message


def decode_from_coordinator(part: bytes) -> FromCoordinator:
    """Raises WireError, also for fields out of bounds."""
    message = decoded(_from_coordinator, part, "of a coordinator")
    if isinstance(message, EngineAddress) and message.address:
        _check_address("EngineAddress", message.address)
    return message


def _check_address(message: str, address: str) -> None:
    if not is_ip_address(address):
        raise WireError(f"{message}.address is {address!r}, not tcp://, an IP address and a port")


def check_identity(identity: bytes, message: FromMember) -> None:
    """Raises WireError unless a join is that of the member with this ZMQ identity."""
    match message:
        case EngineJoin():
            own = engine_identity(message.rank, message.epoch, message.incarnation)
        case ServerJoin():
            own = server_identity(message.server, message.epoch, message.incarnation)
        case _:
            return
    if identity != own:
        raise WireError(f"{type(message).__name__} of {own.decode()}, not of this peer")
