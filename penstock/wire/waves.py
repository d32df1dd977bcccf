"""Messages between engines in lock-step, see :mod:`penstock.engine.group.wave_protocol`.

==========  ======  ================  ====================================================
message     sender  receiver          answer
==========  ======  ================  ====================================================
StartWave   engine  all other ranks   Vote, in every sync round of the wave
Vote        engine  all other ranks   none
LeaveGroup  engine  all other ranks   none; a rank exits once every rank has sent it
==========  ======  ================  ====================================================

A rank connects to the address of every other rank, with its identity as an engine, and only sends. Typed,
array-like msgpack with append-only fields, as :mod:`penstock.wire.messages`. A message is one part.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from penstock.wire.decoding import decoded
from penstock.wire.parts import Part

SyncRound: TypeAlias = Annotated[int, Meta(ge=0)]


class StartWave(msgspec.Struct, array_like=True, frozen=True, tag=32, gc=False):
    """A wave begins; its first sync round is number ``sync_round``."""

    sync_round: SyncRound


class Vote(msgspec.Struct, array_like=True, frozen=True, tag=33, gc=False):
    """Whether the sender has work left after the steps before sync round number ``sync_round``."""

    sync_round: SyncRound
    has_work: bool


class LeaveGroup(msgspec.Struct, array_like=True, frozen=True, tag=34, gc=False):
    """The sender has no more work: it starts no wave, and exits when every rank has sent this."""


WaveMessage: TypeAlias = StartWave | Vote | LeaveGroup

_from_peer: msgspec.msgpack.Decoder[WaveMessage] = msgspec.msgpack.Decoder(WaveMessage)


def decode_from_peer(part: Part) -> WaveMessage:
    """Raises WireError."""
    return decoded(_from_peer, part, "of an engine in lock-step")
