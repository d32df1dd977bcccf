from __future__ import annotations

import pytest

from penstock.engine.receipts import CallRefused, Receipts
from penstock.wire.messages import Call, CallReply


def test_the_first_reply_is_found_by_its_key() -> None:
    receipts = Receipts()
    assert receipts.find(Call(1, "reset", {"a": 1, "b": 2}, "k")) is None
    receipts.remember(Call(1, "reset", {"a": 1, "b": 2}, "k"), CallReply(1, None, "done", 7))
    found = receipts.find(Call(5, "reset", {"b": 2, "a": 1}, "k"))
    assert found == CallReply(5, None, "done", 7, repeated=True)
    assert receipts.find(Call(6, "reset", {"a": 1, "b": 2}, "other")) is None


def test_without_a_key_nothing_is_remembered() -> None:
    receipts = Receipts()
    receipts.remember(Call(1, "reset"), CallReply(1))
    assert receipts.find(Call(2, "reset")) is None


@pytest.mark.parametrize("other", [Call(2, "sleep", {"level": 1}, "k"), Call(2, "sleep", {"level": 2}, "k")])
def test_a_key_for_something_else_names_both(other: Call) -> None:
    receipts = Receipts()
    receipts.remember(Call(1, "reset", {"deep": True}, "k"), CallReply(1))
    with pytest.raises(CallRefused) as refused:
        receipts.find(other)
    assert refused.value.code == "conflict"
    for part in ("'k'", "reset {'deep': True}", f"sleep {other.arguments}"):
        assert part in str(refused.value)


def test_the_oldest_go_first_by_count_and_by_bytes() -> None:
    few = Receipts(most=2)
    for number in range(3):
        few.remember(Call(number, "reset", {}, str(number)), CallReply(number))
    assert [few.find(Call(9, "reset", {}, str(number))) is None for number in range(3)] == [
        True,
        False,
        False,
    ]
    small = Receipts(most_bytes=1000)
    for number in range(3):
        small.remember(Call(number, "reset", {}, str(number)), CallReply(number, None, "x" * 450))
    assert [small.find(Call(9, "reset", {}, str(number))) is None for number in range(3)] == [
        True,
        False,
        False,
    ]
    small.remember(Call(4, "reset", {}, "large"), CallReply(4, None, "x" * 5000))
    assert small.find(Call(9, "reset", {}, "large")) is not None
    assert small.find(Call(9, "reset", {}, "2")) is None
