"""Which endpoint the hash names: the same one everywhere, evenly, and few others when endpoints change."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.pick_request import PickRequest
from penstock.gateway.routing.picker import Picker
from penstock.gateway.routing.prefix_affinity import BLOCK_BYTES, prefix_blocks
from penstock.gateway.routing.rendezvous import stable_hash

NOW = 100.0
SESSIONS = [f"session {number}" for number in range(10_000)]


def endpoints(count: int) -> list[Endpoint]:
    return [Endpoint(f"http://10.0.0.{number}:8000") for number in range(count)]


def picked(among: Sequence[Endpoint], sessions: Sequence[str] = SESSIONS) -> dict[str, str]:
    """Where a gateway that has just started sends each session."""
    picker = Picker({"session": 2.0, "prefix": 2.0, "queue": 2.0})
    return {each: picker.pick(PickRequest(session=each), among, NOW).url for each in sessions}


def test_sessions_are_spread_evenly() -> None:
    """By chi-squared: of 99 degrees of freedom, beyond 178 once in a million."""
    counts = Counter(picked(endpoints(100)).values())
    mean = len(SESSIONS) / 100
    assert sum((count - mean) ** 2 / mean for count in counts.values()) + (100 - len(counts)) * mean < 178


def test_an_endpoint_that_leaves_or_comes_moves_its_own_sessions_alone() -> None:
    hundred = endpoints(100)
    before, after = picked(hundred), picked(hundred[1:])
    moved = {session for session, url in before.items() if after[session] != url}
    assert moved == {session for session, url in before.items() if url == hundred[0].url}
    assert len(moved) < 150, "a hundredth of 10,000, within 5 standard deviations"


def test_neither_order_nor_process_matters() -> None:
    some = endpoints(16)
    assert picked(some, SESSIONS[:200]) == picked(some[::-1], SESSIONS[:200])
    code = (
        "from penstock.gateway.routing.rendezvous import stable_hash as h\n"
        "from penstock.gateway.routing.prefix_affinity import prefix_blocks as p\n"
        "print(h(b's'), p('m', b'x' * 300)[0])"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    expected = f"{stable_hash(b's')} {prefix_blocks('m', b'x' * 300)[0]}\n".encode()
    assert told == [expected, expected]


def test_prompts_without_a_session_go_by_their_first_block() -> None:
    some = endpoints(8)
    for number in range(50):
        beginning = b"%d" % number + b"x" * BLOCK_BYTES
        one, other = (prefix_blocks("m", beginning + end * BLOCK_BYTES) for end in (b"a", b"b"))
        first, second = (Picker({"prefix": 1.0}) for _ in range(2))
        chosen = first.pick(PickRequest(blocks=one), some, NOW)
        assert second.pick(PickRequest(blocks=other), some, NOW) is chosen


def test_an_endpoint_with_far_more_requests_than_the_mean_is_passed_over_for_the_next() -> None:
    some = endpoints(4)
    [(session, url)] = picked(some, SESSIONS[:1]).items()
    [(_, following)] = picked([each for each in some if each.url != url], SESSIONS[:1]).items()
    busy = next(each for each in some if each.url == url)
    busy.in_flight = 11  # the mean is 2.75: 1.25 times that, and 8
    assert picked(some, [session]) == {session: url}
    busy.in_flight = 12
    assert picked(some, [session]) == {session: following}


def test_what_is_known_comes_before_the_hash() -> None:
    some, blocks = endpoints(8), prefix_blocks("m", b"x" * 4 * BLOCK_BYTES)
    for number, holder in enumerate(some):
        session = f"s{number}"
        picker = Picker({"session": 2.0, "prefix": 2.0})
        picker.learn(holder, blocks, None)
        assert picker.pick(PickRequest(blocks=blocks), some, NOW) is holder
        assert picker.pick(PickRequest(blocks=blocks, session=session), some, NOW) is holder
        picker.learn(some[0], (), hash(session))
        assert picker.pick(PickRequest(session=session), some, NOW) is some[0], "where it went last"


def test_a_retry_goes_to_the_next_endpoint_in_the_order_of_the_hash() -> None:
    some = endpoints(8)
    [(session, url)] = picked(some, SESSIONS[:1]).items()
    [(_, following)] = picked([each for each in some if each.url != url], [session]).items()
    picker, request = Picker({"session": 2.0}), PickRequest(session=session)
    request.tried.add(picker.pick(request, some, NOW))
    assert picker.pick(request, some, NOW).url == following
