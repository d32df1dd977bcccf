"""Which endpoints have a stored response."""

from __future__ import annotations

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.response_owners import ResponseOwners

A, B = Endpoint("http://a"), Endpoint("http://b")


def id_of(store: int, number: int) -> str:
    return f"resp_{store:012x}{number:024x}"


def test_a_response_is_where_it_was_made_and_others_of_its_store_as_well() -> None:
    owners = ResponseOwners()
    assert owners.of(id_of(1, 1)) == []
    owners.learn(id_of(1, 1), A)
    assert owners.of(id_of(1, 2)) == [A]
    assert owners.of(id_of(2, 1)) == []


def test_endpoints_may_share_a_store() -> None:
    owners = ResponseOwners()
    owners.learn(id_of(1, 1), A)
    owners.learn(id_of(1, 2), B)
    assert owners.of(id_of(1, 1)) == [A, B]
    assert owners.of(id_of(1, 2)) == [B, A]
    owners.forget(A)
    assert owners.of(id_of(1, 1)) == [B]
    owners.forget(B)
    assert owners.of(id_of(1, 1)) == []


def test_ids_of_other_servers_say_nothing_about_each_other() -> None:
    owners = ResponseOwners()
    owners.learn("resp_" + "0" * 48, A)
    assert owners.of("resp_" + "0" * 48) == [A]
    assert owners.of("resp_" + "0" * 47 + "1") == []


def test_memory_is_bounded() -> None:
    owners = ResponseOwners(most_ids=2, most_stores=2)
    for number in range(4):
        owners.learn(id_of(number, 0), A)
        owners.learn(f"resp_{number}", A)
    assert [bool(owners.of(id_of(number, 0))) for number in range(4)] == [False, False, True, True]
    assert [bool(owners.of(f"resp_{number}")) for number in range(4)] == [False, False, False, True]
