"""The waiting queue: its order, its limits, and who has to leave."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.serve import ServeConfig
from penstock.engine.base import RequestRejected
from penstock.engine.schedule.waiting_queue import BYTES_PER_REQUEST, WaitingQueue, shared_bytes
from penstock.wire.frames import FinishReason
from penstock.wire.messages import SamplingParams, Submit, WireError


def make(**options: Any) -> WaitingQueue:
    return WaitingQueue(ServeConfig(**options))


def request(
    stream: int, tokens: int = 1, priority: int = 0, resumed: int = 0, *, resubmitted: bool = False
) -> Submit:
    return Submit(
        stream,
        b"\0" * 4 * tokens,
        SamplingParams(10, 0),
        priority=priority,
        resumed=resumed,
        resubmitted=resubmitted or resumed > 0,
    )


def order(queue: WaitingQueue) -> list[int]:
    return [waiting.request.stream for waiting in queue]


def displaced(queue: WaitingQueue) -> list[int]:
    failures = queue.take_finished().failed
    assert all(failure.code == "overloaded" for failure in failures)
    return [failure.stream for failure in failures]


def test_first_come_first_served_whatever_the_priorities() -> None:
    queue = make()
    for stream, priority in enumerate((5, 1, 3)):
        queue.push(0, request(stream, priority=priority), 0)
    assert [queue.pop().request.stream for _ in range(3)] == [0, 1, 2]
    assert not queue


def test_lower_priorities_run_earlier_and_ties_by_arrival() -> None:
    queue = make(scheduling_policy="priority")
    for stream, priority in enumerate((0, 7, -1, 7, 0, -(1 << 63))):
        queue.push(0, request(stream, priority=priority), 0)
    assert order(queue) == [5, 2, 0, 4, 1, 3]


def test_resubmitted_streams_come_before_new_ones_of_their_priority() -> None:
    queue = make(scheduling_policy="priority")
    for stream, (priority, resubmitted) in enumerate(((1, False), (1, True), (0, False), (1, True))):
        queue.push(0, request(stream, 5, priority, resubmitted=resubmitted), 0)
    assert order(queue) == [2, 1, 3, 0]


def test_a_stream_waits_once() -> None:
    queue = make()
    queue.push(0, request(3), 0)
    queue.push(1, request(3), 0)
    with pytest.raises(WireError, match=r"Submit\.stream 3"):
        queue.push(0, request(3), 0)


def test_abort_gives_each_stream_one_end() -> None:
    queue = make()
    for stream in range(3):
        queue.push(1, request(stream, 4, resumed=stream), 0)
    assert [queue.abort(*key) for key in ((1, 2), (1, 0))] == [True, True]
    assert [queue.abort(*key) for key in ((1, 2), (0, 1))] == [False, False]
    rows = queue.take_finished()
    assert rows.stream.tolist() == [2, 0]
    assert rows.position.tolist() == [2, 0]
    assert rows.finish is not None
    assert rows.finish.tolist() == [FinishReason.ABORT] * 2
    assert not queue.has_finished()
    assert order(queue) == [1]
    assert queue.tokens == 4


def test_an_api_server_that_is_gone_is_forgotten() -> None:
    queue = make(scheduling_policy="priority", max_num_queued_reqs=4)
    for stream in range(4):
        queue.push(stream % 2, request(stream, priority=1), 0)
    queue.abort(0, 0)
    queue.push(1, request(4, priority=1), 0)
    queue.push(1, request(5), 0)  # displaces stream 4
    queue.drop_server(1)
    rows = queue.take_finished()
    assert rows.stream.tolist() == [0]
    assert not rows.failed
    assert order(queue) == [2]


def test_failing_all_ends_those_as_well_that_were_given_up() -> None:
    queue = make(scheduling_policy="priority", max_num_queued_reqs=2)
    queue.push(0, request(0, priority=2), 0)
    queue.push(0, request(1, 5, resumed=3), 0)
    queue.push(0, request(2), 0)
    queue.abort(0, 1)
    failures = queue.fail_all("engine_error", "gone")
    assert {(failure.stream, failure.position, failure.code) for failure in failures} == {
        (0, 0, "overloaded"),
        (1, 3, "engine_error"),
        (2, 0, "engine_error"),
    }
    assert (len(queue), queue.tokens, queue.has_finished()) == (0, 0, False)


# -- limits


def test_requests_beyond_the_limit_and_the_free_slots_are_refused() -> None:
    queue = make(max_num_queued_reqs=2)
    for stream in range(5):
        queue.push(0, request(stream, 2), 3)
    with pytest.raises(RequestRejected, match=r"2 others wait and at most 2 may \(--max-num-q") as refusal:
        queue.push(0, request(5, 2), 3)
    assert refusal.value.code == "overloaded"
    assert len(queue) == 5


def test_a_request_is_not_told_of_its_own_choices() -> None:
    queue = make(max_num_queued_reqs=2)
    queue.push(0, request(0), 0)
    prompt = b"\0" * 8
    queue.push(0, Submit(1, prompt, SamplingParams(10, 0)), 0)
    with pytest.raises(RequestRejected, match="1 others wait and at most 2 may"):
        queue.push(0, Submit(2, prompt, SamplingParams(10, 0)), 0)
    queue = make(max_num_queued_tokens=4)
    queue.push(0, request(0), 0)
    queue.push(0, Submit(1, prompt, SamplingParams(10, 0)), 0)
    with pytest.raises(RequestRejected, match="1 prompt tokens of others wait and at most 4 may"):
        queue.push(0, Submit(2, prompt, SamplingParams(10, 0)), 0)


def test_no_queue_at_all_still_fills_the_slots() -> None:
    queue = make(max_num_queued_reqs=0)
    queue.push(0, request(0), 1)
    with pytest.raises(RequestRejected):
        queue.push(0, request(1), 1)


def test_prompt_tokens_beyond_the_limit_are_refused_unless_nothing_waits() -> None:
    queue = make(max_num_queued_tokens=10)
    queue.push(0, request(0, 30), 8)
    with pytest.raises(RequestRejected, match="30 prompt tokens of others wait and at most 10 may"):
        queue.push(0, request(1, 1), 8)
    queue.pop()
    queue.push(0, request(2, 6), 8)
    queue.push(0, request(3, 4), 8)
    with pytest.raises(RequestRejected):
        queue.push(0, request(4, 1), 8)


def test_a_resubmitted_stream_is_neither_refused_nor_displaced() -> None:
    queue = make(scheduling_policy="priority", max_num_queued_reqs=1, max_num_queued_tokens=5)
    queue.push(0, request(0, 4, 9, resumed=2), 0)
    queue.push(0, request(1, 4, 9, resubmitted=True), 0)  # it only waited where it was accepted
    with pytest.raises(RequestRejected):
        queue.push(0, request(2, 1, 0), 0)
    assert order(queue) == [0, 1]


def test_a_more_important_request_displaces_the_latest_of_the_least_important() -> None:
    queue = make(scheduling_policy="priority", max_num_queued_reqs=3)
    for stream, priority in enumerate((5, 1, 5)):
        queue.push(0, request(stream, priority=priority), 0)
    queue.push(0, request(3, priority=2), 0)
    assert displaced(queue) == [2]
    with pytest.raises(RequestRejected):
        queue.push(0, request(4, priority=5), 0)
    assert order(queue) == [1, 3, 0]


def test_several_are_displaced_only_when_that_is_enough() -> None:
    queue = make(scheduling_policy="priority", max_num_queued_tokens=10)
    for stream, (tokens, priority) in enumerate(((6, 0), (2, 8), (2, 9))):
        queue.push(0, request(stream, tokens, priority), 0)
    with pytest.raises(RequestRejected):
        queue.push(0, request(3, 5, 1), 0)
    assert not queue.has_finished()
    queue.push(0, request(4, 4, 1), 0)
    assert displaced(queue) == [2, 1]
    assert order(queue) == [0, 4]
    assert queue.tokens == 10


# -- against a plain list

Action = tuple[str, int, int, bool]
actions = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "pop", "abort"]),
        st.integers(0, 9),
        st.integers(-2, 2),
        st.booleans(),
    )
)


@given(actions, st.none() | st.integers(0, 4))
def test_it_is_a_sorted_list(taken: list[Action], limit: int | None) -> None:
    queue = make(scheduling_policy="priority", max_num_queued_reqs=limit)
    model: list[tuple[int, bool, int, int]] = []
    """(priority, new, arrival, stream)"""
    for arrival, (what, stream, priority, resumed) in enumerate(taken):
        model.sort()
        if what == "pop" and model:
            assert queue.pop().request.stream == model.pop(0)[3]
        elif what == "abort":
            assert queue.abort(0, stream) == any(entry[3] == stream for entry in model)
            model = [entry for entry in model if entry[3] != stream]
        elif what == "push" and all(entry[3] != stream for entry in model):
            entry = (priority, not resumed, arrival, stream)
            submit = request(stream, 2, priority, int(resumed))
            if limit is not None and not resumed and len(model) >= limit:
                worse = [other for other in model if other[0] > priority and other[1]]
                needed = len(model) + 1 - limit
                if len(worse) < needed:
                    with pytest.raises(RequestRejected):
                        queue.push(0, submit, 0)
                    continue
                gone = worse[::-1][:needed]
                model = [other for other in model if other not in gone]
                queue.push(0, submit, 0)
                assert displaced(queue) == [other[3] for other in gone]
            else:
                queue.push(0, submit, 0)
            model.append(entry)
        queue.take_finished()
    assert order(queue) == [entry[3] for entry in sorted(model)]
    assert queue.tokens == 2 * len(model)


# -- memory


def test_the_memory_of_waiting_requests_is_bounded_per_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4000 + BYTES_PER_REQUEST + sys.getsizeof(b"")
    monkeypatch.setattr("penstock.engine.schedule.waiting_queue.MAX_QUEUED_BYTES", 3 * size)
    queue = make()
    for stream in range(3):
        queue.push(0, request(stream, 1000), 0)
    with pytest.raises(RequestRejected, match="of this API server wait") as refused:
        queue.push(0, request(3, 1000), 99)
    assert refused.value.code == "overloaded"
    queue.push(1, request(3, 1000), 0)  # another API server's
    for stream in range(4, 7):
        queue.push(0, request(stream, 1000, resumed=1), 0)
    with pytest.raises(RequestRejected):
        queue.push(0, request(7, 1000, resumed=1), 0)
    queue.abort(0, 4)
    queue.push(0, request(7, 1000, resumed=1), 0)
    queue.drop_server(0)
    queue.push(0, request(3, 1000), 0)
    queue.fail_all("x", "y")
    assert (queue._bytes.of(0), queue._bytes.of(1)) == (0, 0)


def test_a_request_above_the_bound_waits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.schedule.waiting_queue.MAX_QUEUED_BYTES", 1000)
    queue = make()
    queue.push(0, request(0, 1000), 0)
    with pytest.raises(RequestRejected):
        queue.push(0, request(1), 0)


def test_what_choices_of_a_request_share_counts_once() -> None:
    queue = make()
    first = request(0, 100_000)
    for stream in range(1024):
        queue.push(0, msgspec.structs.replace(first, stream=stream), 0)
    shared = 400_000 + sys.getsizeof(b"")
    assert queue._bytes.of(0) == shared + 1024 * BYTES_PER_REQUEST
    for left in range(1023, 0, -1):
        queue.pop()
        assert queue._bytes.of(0) == shared + left * BYTES_PER_REQUEST
    queue.pop()
    assert queue._bytes.of(0) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", tuple(range(1000, 11_000))),
        ("allowed_token_ids", tuple(range(1000, 11_000))),
        ("bad_words", tuple((token, token + 1) for token in range(1000, 6000))),
        ("logit_bias", {token: 0.5 * token for token in range(1000, 11_000)}),
        ("grammar", "é" * 100_000),
    ],
)
def test_lists_and_texts_count_as_the_memory_that_they_take(field: str, value: Any) -> None:
    encoded = msgspec.msgpack.encode(SamplingParams(10, 0, **{field: value}))
    tracemalloc.start()
    sampling = msgspec.msgpack.decode(encoded, type=SamplingParams)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.7 * taken < shared_bytes(Submit(0, b"1234", sampling)) < 2 * taken
