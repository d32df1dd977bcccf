"""An engine that is paused and resumed, by the messages of its API servers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from penstock.wire.frames import FinishReason
from penstock.wire.messages import (
    PAUSE,
    PAUSED,
    Abort,
    ApplyStates,
    DesiredState,
    ObservedState,
    RpcCall,
    RpcReply,
    StatesObserved,
)
from tests.engine.loops import ENDLESS, Host
from tests.engine.peers import ApiServer
from tests.engine.support import submit

Start = Callable[..., Host]
Connect = Callable[..., ApiServer]


class Pausing:
    """Sets the state, and reads what the engine says of it."""

    def __init__(self, peer: ApiServer) -> None:
        self.peer = peer
        self.generation = 0

    def ask(self, paused: bool, mode: str = "abort", *, rollback: bool = False) -> None:
        self.generation += 1
        value = {"paused": paused, "mode": mode}
        self.peer.send(ApplyStates([DesiredState(PAUSE, self.generation, value, rollback=rollback)]))

    def observed(self) -> ObservedState | None:
        """What is observed of the latest generation, once it is."""
        for message in self.peer.received.others:
            if isinstance(message, StatesObserved):
                for state in message.states:
                    if state.name == PAUSE and state.generation == self.generation:
                        return state
        return None

    def wait(self) -> ObservedState:
        self.peer.read(lambda: self.observed() is not None)
        state = self.observed()
        assert state is not None
        self.peer.received.others.clear()
        return state

    def set(self, paused: bool, mode: str = "abort") -> ObservedState:
        self.ask(paused, mode)
        return self.wait()


@pytest.fixture
def engine(host: Start) -> Host:
    return host(max_num_seqs=2, synthetic_step_ms=1)


@pytest.fixture
def peer(engine: Host, connect: Connect) -> ApiServer:
    return connect()


@pytest.fixture
def pausing(peer: ApiServer) -> Pausing:
    return Pausing(peer)


def run_some(peer: ApiServer, *streams: int) -> None:
    peer.read(lambda: all(len(peer.received.tokens.get(stream, [])) > 5 for stream in streams))


def rest(peer: ApiServer) -> dict[int, int]:
    """Tokens by stream, once all that was on its way has come: messages of an engine keep their order."""
    peer.received.others.clear()
    peer.send(RpcCall(1000, "reset_prefix_cache"))
    peer.read(lambda: any(isinstance(message, RpcReply) for message in peer.received.others))
    peer.received.others.clear()
    return {stream: len(tokens) for stream, tokens in peer.received.tokens.items()}


def test_kept_streams_stop_and_go_on_with_the_same_tokens(peer: ApiServer, pausing: Pausing) -> None:
    peer.send(submit(1, 400), submit(2, 400))
    run_some(peer, 1, 2)
    assert pausing.set(True, "keep").result == {"paused": True, "mode": "keep"}
    peer.send(submit(3, 400, seed=1))
    before = rest(peer)
    assert rest(peer) == before
    assert 3 not in before
    assert pausing.set(False).result == {"paused": False, "mode": ""}
    received = peer.read_ends(1, 2, 3)
    assert received.tokens[1] == received.tokens[3]
    assert len(received.tokens[1]) == len(received.tokens[2]) == 400


def test_streams_end_with_what_they_have(peer: ApiServer, pausing: Pausing) -> None:
    peer.send(submit(1, ENDLESS), submit(2, ENDLESS, interval=100), submit(3, ENDLESS))
    run_some(peer, 1)
    assert pausing.set(True, "abort").error is None
    received = peer.received
    assert received.finish == dict.fromkeys((1, 2, 3), FinishReason.ABORT)
    assert 0 <= len(received.tokens[1]) - len(received.tokens[2]) <= 1, "held tokens come as well"
    assert received.failed == {}
    peer.send(submit(4, 5))
    assert peer.read_ends(4).failed[4].code == PAUSED
    pausing.set(False)
    peer.send(submit(5, 5))
    assert peer.read_ends(5).tokens[5]


def test_streams_finish_and_new_ones_are_refused_meanwhile(peer: ApiServer, pausing: Pausing) -> None:
    peer.send(submit(1, ENDLESS), submit(2, 50), submit(3, 50))
    run_some(peer, 1)
    pausing.ask(True, "wait")
    peer.send(submit(4, 5))
    received = peer.read_ends(2, 3, 4)
    assert received.failed[4].code == PAUSED
    assert len(received.tokens[3]) == 50, "it was queued before"
    assert pausing.observed() is None
    peer.send(Abort([1]))
    assert pausing.wait().error is None
    assert received.finish[1] == FinishReason.ABORT


def test_the_end_of_a_kept_stream_is_told_at_once(peer: ApiServer, pausing: Pausing) -> None:
    peer.send(submit(1, ENDLESS), submit(2, ENDLESS), submit(3, ENDLESS))
    run_some(peer, 1, 2)
    pausing.set(True, "keep")
    peer.send(Abort([1, 3]))
    received = peer.read_ends(1, 3)
    before = rest(peer)
    assert received.finish == dict.fromkeys((1, 3), FinishReason.ABORT)
    assert rest(peer) == before
    assert not received.ended(2)


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_kept_streams_may_still_end_or_finish(peer: ApiServer, pausing: Pausing, mode: str) -> None:
    peer.send(submit(1, 300), submit(2, 300), submit(3, 300))
    run_some(peer, 1)
    pausing.set(True, "keep")
    pausing.set(True, mode)
    received = peer.received
    reason = FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH
    assert received.finish == dict.fromkeys((1, 2, 3), reason)
    peer.send(submit(4, 5))
    assert peer.read_ends(4).failed[4].code == PAUSED


def test_a_change_that_is_rolled_back_leaves_no_trace(peer: ApiServer, pausing: Pausing) -> None:
    peer.send(submit(1, 400))
    run_some(peer, 1)
    pausing.ask(True, "wait")
    pausing.ask(False, rollback=True)
    assert pausing.wait().result == {"paused": False, "mode": ""}
    peer.send(submit(2, 5))
    peer.read_ends(1, 2)
    assert len(peer.received.tokens[1]) == 400
    assert peer.received.tokens[2]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"paused": 1}, "paused is 1, not true or false"),
        ({"paused": True, "mode": "halt"}, "mode is 'halt', not abort, wait, keep"),
    ],
)
def test_values_that_there_are_not(
    peer: ApiServer, pausing: Pausing, value: dict[str, object], error: str
) -> None:
    pausing.generation = 1
    peer.send(ApplyStates([DesiredState(PAUSE, 1, value)]))
    assert pausing.wait().error == error


def test_a_kept_stream_does_not_hinder_a_stop(engine: Host, peer: ApiServer, pausing: Pausing) -> None:
    peer.send(submit(1, ENDLESS))
    run_some(peer, 1)
    pausing.set(True, "keep")
    engine.close()
    assert engine.error is None


# -- abort_streams


def test_streams_are_aborted_by_all_api_servers(peer: ApiServer, connect: Connect) -> None:
    other = connect(1)
    other.send(submit(1, ENDLESS))
    peer.send(submit(1, ENDLESS), submit(2, ENDLESS))
    other.ping()
    peer.ping()
    assert peer.call("abort_streams", all=True).result == 3
    assert peer.read_ends(1, 2).finish == dict.fromkeys((1, 2), FinishReason.ABORT)
    assert other.read_ends(1).finish == {1: FinishReason.ABORT}


@pytest.mark.parametrize(
    ("arguments", "ended"),
    [
        ({"ids": ["a-1", "c"]}, {1, 3}),
        ({"prefix": "a-"}, {1, 2}),
        ({"ids": []}, set()),
        ({"prefix": "1"}, set()),
    ],
)
def test_streams_are_aborted_by_the_ids_of_their_requests(
    peer: ApiServer, arguments: dict[str, object], ended: set[int]
) -> None:
    ids = {1: ("a-1",), 2: ("a-2", "b"), 3: ("c",)}
    for stream, names in ids.items():
        peer.send(msgspec.structs.replace(submit(stream, ENDLESS), ids=names))
    peer.ping()
    assert peer.call("abort_streams", **arguments).result == len(ended)
    assert peer.read_ends(*ended).finish.keys() == ended


@pytest.mark.parametrize("arguments", [{}, {"all": False}, {"prefix": ""}, {"ids": "1"}, {"ids": [1]}])
def test_a_call_that_names_no_streams(peer: ApiServer, arguments: dict[str, object]) -> None:
    error = peer.call("abort_streams", **arguments).error
    assert error is not None
    assert "ids" in error
