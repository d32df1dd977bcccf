"""What an engine keeps of prompts, for whom and for how long."""

from __future__ import annotations

import pytest

from penstock.engine.base import RequestRejected
from penstock.engine.loop.kept_prompts import KeptPrompts
from penstock.wire.messages import PROMPT_GONE, KeptPrefix, SamplingParams, Submit

ONE, OTHER = b"api-server-0", b"api-server-1"
NEW = b"\7\0\0\0"


def keep(kept: KeptPrompts, number: int, tokens: int = 10, peer: bytes = ONE) -> None:
    kept.restore(peer, Submit(0, bytes(4 * tokens), SamplingParams(1, 1), keep=number))


def refer(kept: KeptPrompts, prefix: KeptPrefix, peer: bytes = ONE) -> bytes:
    return kept.restore(peer, Submit(0, NEW, SamplingParams(1, 1), prefix=prefix)).prompt


def gone(kept: KeptPrompts, prefix: KeptPrefix, peer: bytes = ONE) -> bool:
    with pytest.raises(RequestRejected) as error:
        refer(kept, prefix, peer)
    return error.value.code == PROMPT_GONE


def test_a_prompt_is_put_together() -> None:
    kept = KeptPrompts(1000)
    keep(kept, 1)
    assert refer(kept, KeptPrefix(1, 10)) == bytes(40) + NEW
    assert refer(kept, KeptPrefix(1, 3, replaced=True)) == bytes(12) + NEW
    assert gone(kept, KeptPrefix(1, 3))
    assert (kept.hits, kept.misses, kept.bytes) == (2, 1, 0)


def test_a_prefix_longer_than_what_is_kept_is_not_there() -> None:
    kept = KeptPrompts(1000)
    keep(kept, 1)
    assert gone(kept, KeptPrefix(1, 11))


def test_no_connection_reaches_what_another_one_has_sent() -> None:
    kept = KeptPrompts(1000)
    keep(kept, 1)
    assert gone(kept, KeptPrefix(1, 10), OTHER)
    keep(kept, 1, 5, OTHER)
    assert refer(kept, KeptPrefix(1, 5), OTHER) == bytes(20) + NEW
    kept.forget(ONE)
    assert kept.bytes == 20
    assert gone(kept, KeptPrefix(1, 10))
    assert refer(kept, KeptPrefix(1, 5), OTHER) == bytes(20) + NEW


def test_the_least_recently_used_are_dropped_at_the_limit() -> None:
    kept = KeptPrompts(100)
    keep(kept, 1)
    keep(kept, 2)
    refer(kept, KeptPrefix(1, 10))
    keep(kept, 3)
    assert gone(kept, KeptPrefix(2, 1))
    assert refer(kept, KeptPrefix(1, 10))
    keep(kept, 4, 30)  # larger than the room
    assert kept.bytes == 0


def test_without_room_nothing_is_kept() -> None:
    kept = KeptPrompts()
    keep(kept, 1)
    assert kept.bytes == 0
    assert gone(kept, KeptPrefix(1, 1))
