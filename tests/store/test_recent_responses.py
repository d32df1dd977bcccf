"""What a connection keeps of responses that are not stored."""

from __future__ import annotations

from penstock.store.recent_responses import MAX_BYTES, AllRecentResponses, RecentResponses
from penstock.store.stored_response import StoredResponse


def response(id: str, previous: str | None = None, size: int = 10) -> StoredResponse:
    return StoredResponse(id, "", 0.0, "completed", b"x" * size, b"[]", previous, "m")


def ids(chain: list[StoredResponse]) -> list[str]:
    return [each.id for each in chain]


def test_a_chain_is_found_from_its_oldest_response_on() -> None:
    recent = RecentResponses(AllRecentResponses())
    for id, previous in (("b", "a"), ("c", "b"), ("d", "c"), ("fork", "b")):
        recent.keep(response(id, previous))
    assert ids(recent.chain("d")) == ["b", "c", "d"]
    assert ids(recent.chain("fork")) == ["b", "fork"]
    assert recent.chain("a") == []


def test_a_connection_loses_its_oldest_responses() -> None:
    everything = AllRecentResponses()
    recent = RecentResponses(everything)
    for number in range(6):
        recent.keep(response(str(number), str(number - 1), MAX_BYTES // 4))
    assert recent.size == everything.size <= MAX_BYTES
    assert ids(recent.chain("5")) == ["3", "4", "5"]
    recent.keep(response("huge", size=MAX_BYTES))
    assert recent.chain("huge") == []


def test_the_connection_that_has_waited_longest_makes_room() -> None:
    everything = AllRecentResponses(limit=10_000)
    connections = [RecentResponses(everything) for _ in range(3)]
    for connection in connections:
        connection.keep(response("a", size=2000))
    connections[0].chain("a")
    connections[2].keep(response("b", size=2000))
    assert [ids(each.chain("a")) for each in connections] == [["a"], [], ["a"]]
    assert everything.size <= 10_000
    for connection in connections:
        connection.clear()
    assert everything.size == 0
