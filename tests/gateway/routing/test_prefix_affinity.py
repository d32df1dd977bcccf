"""The index of prompts' beginnings, against a plain one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_columns import EndpointColumns
from penstock.gateway.routing.prefix_affinity import (
    BLOCK_BYTES,
    BLOCK_ENDS,
    GROWTH,
    MAX_BYTES,
    PrefixIndex,
    prefix_blocks,
)


def prompt(*blocks: int) -> bytes:
    return b"".join(bytes([block]) * BLOCK_BYTES for block in blocks)


def test_blocks_stand_for_all_text_before_them() -> None:
    one, other = prefix_blocks("m", prompt(1, 2, 3)), prefix_blocks("m", prompt(1, 9, 3))
    assert len(one) == 3
    assert one[0] == other[0]
    assert one[2] != other[2]
    assert prefix_blocks("n", prompt(1))[0] != one[0]


def test_only_whole_blocks_and_not_too_many() -> None:
    assert prefix_blocks("m", b"x" * (BLOCK_BYTES - 1)) == []
    assert len(prefix_blocks("m", b"x" * (2 * BLOCK_BYTES - 1))) == 1
    assert len(prefix_blocks("m", bytes(2 * MAX_BYTES))) == len(BLOCK_ENDS)


def test_a_difference_is_found_wherever_it_is() -> None:
    """Histories of agents have long beginnings in common. A known prefix is told to a few per cent."""
    endpoint, common = Endpoint("http://e"), bytes(300_000)
    index = PrefixIndex(EndpointColumns())
    index.note(prefix_blocks("m", common + b"a" * 100_000), endpoint)
    for length in (100_000, 200_000, 300_000):
        other = prefix_blocks("m", common[:length] + b"b" * 100_000)
        share = float(index.shares(other)[0])
        exact = length / (length + 100_000)
        assert abs(share - exact) < 2 / GROWTH


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=4), st.booleans()), max_size=30
    )
)
def test_matches_are_those_of_a_plain_index(events: list[tuple[int, list[int], bool]]) -> None:
    endpoints = [Endpoint(f"http://{number}") for number in range(4)]
    index = PrefixIndex(EndpointColumns())
    seen: list[set[tuple[int, ...]]] = [set() for _ in endpoints]
    for number, path, forgotten in events:
        blocks = prefix_blocks("m", prompt(*path))
        expected = [
            max(length for length in range(len(path) + 1) if length == 0 or tuple(path[:length]) in known)
            for known in seen
        ]
        assert index.matched(blocks, endpoints) == expected
        if forgotten:
            index.forget(endpoints[number])
            seen[number].clear()
        else:
            index.note(blocks, endpoints[number])
            seen[number] |= {tuple(path[:length]) for length in range(1, len(path) + 1)}


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    endpoint = Endpoint("http://e")
    index = PrefixIndex(EndpointColumns(), most_blocks=4)
    for block in range(6):
        index.note(prefix_blocks("m", prompt(block)), endpoint)
    found = [index.matched(prefix_blocks("m", prompt(block)), [endpoint])[0] for block in range(6)]
    assert found == [0, 0, 1, 1, 1, 1]
