"""Calls that are sent whole, and calls without ids."""

from __future__ import annotations

from penstock.dialects.whole_calls import MissingCallIds, whole_calls
from penstock.generation.parsers.delta import CallDelta


def test_pieces_become_calls() -> None:
    pieces = [
        CallDelta(0, "a", '{"x"', "id0"),
        CallDelta(0, None, ": 1}"),
        CallDelta(1, "b", "", "id1"),
        CallDelta(2, "c", '{"cut": ', "id2"),
    ]
    assert whole_calls(pieces) == [(0, "id0", "a", {"x": 1}), (1, "id1", "b", {}), (2, "id2", "c", {})]
    assert whole_calls([]) == []


def test_results_find_their_calls() -> None:
    ids = MissingCallIds()
    first, second = ids.of_call(None, "f"), ids.of_call("", "f")
    other, named = ids.of_call(None, "g"), ids.of_call("mine", "f")
    assert len({first, second, other, named}) == 4
    assert ids.of_result(None, "g") == other
    assert ids.of_result("mine", "f") == "mine"
    assert ids.of_result(None, "f") == first
    assert ids.of_result(None, None) == second
    assert ids.of_result("stray", "f") == "stray"
    assert ids.of_result(None, "f") is None
