"""What engines in lock-step say to each other, see :mod:`penstock.engine.tandem`.

A rank connects to the address of every other rank, under the identity of an engine, and only sends. Typed,
array-like msgpack with append-only fields, as :mod:`penstock.wire.messages`. A message is one part.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from penstock.wire.messages import decoded

Agreement: TypeAlias = Annotated[int, Meta(ge=0)]


class Wake(msgspec.Struct, array_like=True, frozen=True, tag=32, gc=False):
    """A wave begins; its first agreement is number ``agreement``."""

    agreement: Agreement


class Vote(msgspec.Struct, array_like=True, frozen=True, tag=33, gc=False):
    """Whether the sender has work after the steps before agreement number ``agreement``."""

    agreement: Agreement
    has_work: bool


class Leave(msgspec.Struct, array_like=True, frozen=True, tag=34, gc=False):
    """The sender has no work from here on: it begins no wave, and ends when all have said so."""


TandemMessage: TypeAlias = Wake | Vote | Leave

_from_peer: msgspec.msgpack.Decoder[TandemMessage] = msgspec.msgpack.Decoder(TandemMessage)


def decode_from_peer(part: bytes) -> TandemMessage:
    """Raises WireError."""
    return decoded(_from_peer, part, "of an engine in lock-step")
