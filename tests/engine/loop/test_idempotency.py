from __future__ import annotations

import pytest

from penstock.engine.loop.idempotency import IdempotencyCache, RpcError
from penstock.wire.messages import RpcCall, RpcReply


def test_the_first_reply_is_found_by_its_key() -> None:
    receipts = IdempotencyCache()
    assert receipts.find_reply(RpcCall(1, "reset", {"a": 1, "b": 2}, "k")) is None
    receipts.remember(RpcCall(1, "reset", {"a": 1, "b": 2}, "k"), RpcReply(1, None, "done", 7))
    found = receipts.find_reply(RpcCall(5, "reset", {"b": 2, "a": 1}, "k"))
    assert found == RpcReply(5, None, "done", 7, repeated=True)
    assert receipts.find_reply(RpcCall(6, "reset", {"a": 1, "b": 2}, "other")) is None


def test_without_a_key_nothing_is_remembered() -> None:
    receipts = IdempotencyCache()
    receipts.remember(RpcCall(1, "reset"), RpcReply(1))
    assert receipts.find_reply(RpcCall(2, "reset")) is None


def test_arguments_that_cannot_be_compared_are_refused_before_the_call_runs() -> None:
    receipts = IdempotencyCache()
    with pytest.raises(ValueError, match="arguments of reset: keys of objects are strings"):
        receipts.find_reply(RpcCall(1, "reset", {"a": {1: 2, "b": 3}}, "k"))


@pytest.mark.parametrize(
    "other", [RpcCall(2, "sleep", {"level": 1}, "k"), RpcCall(2, "sleep", {"level": 2}, "k")]
)
def test_a_key_for_something_else_names_both(other: RpcCall) -> None:
    receipts = IdempotencyCache()
    receipts.remember(RpcCall(1, "reset", {"deep": True}, "k"), RpcReply(1))
    with pytest.raises(RpcError) as refused:
        receipts.find_reply(other)
    assert refused.value.code == "conflict"
    for part in ("'k'", "reset {'deep': True}", f"sleep {other.arguments}"):
        assert part in str(refused.value)


def test_the_oldest_go_first_by_count_and_by_bytes() -> None:
    few = IdempotencyCache(most=2)
    for number in range(3):
        few.remember(RpcCall(number, "reset", {}, str(number)), RpcReply(number))
    assert [few.find_reply(RpcCall(9, "reset", {}, str(number))) is None for number in range(3)] == [
        True,
        False,
        False,
    ]
    small = IdempotencyCache(most_bytes=1000)
    for number in range(3):
        small.remember(RpcCall(number, "reset", {}, str(number)), RpcReply(number, None, "x" * 450))
    assert [small.find_reply(RpcCall(9, "reset", {}, str(number))) is None for number in range(3)] == [
        True,
        False,
        False,
    ]
    small.remember(RpcCall(4, "reset", {}, "large"), RpcReply(4, None, "x" * 5000))
    assert small.find_reply(RpcCall(9, "reset", {}, "large")) is not None
    assert small.find_reply(RpcCall(9, "reset", {}, "2")) is None


def test_a_reply_that_replaces_another_one_counts_alone() -> None:
    receipts = IdempotencyCache(most_bytes=1000)
    receipts.remember(RpcCall(0, "reset", {}, "kept"), RpcReply(0))
    for number in range(20):
        receipts.remember(RpcCall(number, "reset", {}, "again"), RpcReply(number, None, "x" * 450))
    assert receipts.find_reply(RpcCall(9, "reset", {}, "kept")) is not None
