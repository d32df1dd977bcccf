"""Calls on an engine, without an engine: runs, receipts, and changes in two phases."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.engine.loop.rpc import MAX_WAITING_CALLS, RpcServer
from penstock.engine.loop.two_phase import TwoPhaseParticipant
from penstock.wire.messages import MAX_CALL_BYTES, RpcCall, RpcPhase, RpcReply


class Level:
    """A state; preparing 13 fails."""

    name = "level"

    def __init__(self) -> None:
        self.level = 0
        self.ready = True
        self.prepared_level: int | None = None
        self.log: list[str] = []

    def prepare(self, arguments: dict[str, Any]) -> None:
        if arguments["level"] == 13:
            raise MemoryError("no room")
        self.prepared_level = arguments["level"]
        self.log.append(f"prepare {self.prepared_level}")

    def prepared(self, *, decided: bool) -> bool:
        return self.ready

    def commit(self) -> None:
        assert self.prepared_level is not None
        self.level = self.prepared_level
        self.log.append(f"commit {self.level}")

    def result(self) -> int:
        return self.level

    def abort(self) -> None:
        self.log.append(f"abort {self.prepared_level}")


class Desk:
    def __init__(self) -> None:
        self.state = Level()
        self.runs: list[str] = []
        self.replies: list[tuple[int, RpcReply]] = []
        self.step = 0
        self.calls = RpcServer(
            self.run, {"level": TwoPhaseParticipant(self.state)}, self.reply, lambda: self.step
        )
        self._number = 0

    def run(self, method: str, arguments: dict[str, Any]) -> Any:
        self.runs.append(method)
        self.step += 1
        match method:
            case "echo":
                return arguments
            case "object":
                return object()
            case "bug":
                raise KeyError("whoops")
            case "grow":
                raise ConfigError("out of memory")
        raise ValueError(f"no {method}")

    def reply(self, server: int, reply: RpcReply) -> None:
        self.replies.append((server, reply))

    def ask(self, method: str, server: int = 0, **fields: Any) -> RpcReply | None:
        """The reply, if it comes at once."""
        self._number += 1
        self.calls.handle(server, RpcCall(self._number, method, **fields))
        if self.replies and self.replies[-1][1].call == self._number:
            return self.replies[-1][1]
        return None

    def phase(
        self, phase: RpcPhase, level: int, key: str, server: int = 0, version: int = 0
    ) -> RpcReply | None:
        return self.ask("level", server, arguments={"level": level}, key=key, phase=phase, version=version)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def error_of(reply: RpcReply | None) -> str:
    assert reply is not None
    assert reply.error is not None
    return reply.error


# -- calls that run


@pytest.mark.parametrize(
    ("method", "reply"),
    [
        ("echo", RpcReply(1, None, {"a": 1}, 1)),
        ("fly", RpcReply(1, "no fly", None, 1)),
        ("bug", RpcReply(1, "KeyError: 'whoops'", None, 1)),
        ("grow", RpcReply(1, "out of memory", None, 1)),
    ],
)
def test_a_call_runs_and_says_when(desk: Desk, method: str, reply: RpcReply) -> None:
    assert desk.ask(method, arguments={"a": 1}) == reply


def test_a_result_that_cannot_be_sent_is_an_error(desk: Desk) -> None:
    assert error_of(desk.ask("object")).startswith("TypeError")
    assert desk.ask("echo") is not None


@pytest.mark.parametrize("method", ["echo", "fly", "object"])
def test_the_same_key_never_runs_twice(desk: Desk, method: str) -> None:
    first = desk.ask(method, key="k")
    again = desk.ask(method, server=1, key="k")
    assert desk.runs == [method]
    assert first is not None
    assert again is not None
    assert (again.error, again.result, again.step, again.repeated) == (first.error, first.result, 1, True)


def test_without_a_key_each_call_runs(desk: Desk) -> None:
    desk.ask("echo")
    desk.ask("echo")
    assert desk.runs == ["echo", "echo"]


def test_a_key_that_was_used_for_something_else(desk: Desk) -> None:
    desk.ask("echo", key="k")
    reply = desk.ask("echo", key="k", arguments={"b": 2})
    assert "was used for echo, and cannot be used for echo {'b': 2}" in error_of(reply)
    assert reply is not None
    assert reply.code == "conflict"
    assert desk.runs == ["echo"]


# -- changes


def test_prepared_and_made(desk: Desk) -> None:
    assert desk.phase(RpcPhase.PREPARE, 2, "k") == RpcReply(1)
    assert desk.phase(RpcPhase.COMMIT, 2, "k", version=1) == RpcReply(2, None, 2)
    assert desk.state.log == ["prepare 2", "commit 2"]
    # to whoever asks again, first for the decision, then for the change as a whole
    assert desk.phase(RpcPhase.COMMIT, 2, "k", server=1, version=1) == RpcReply(3, None, 2, repeated=True)
    assert desk.phase(RpcPhase.PREPARE, 2, "k", server=1) == RpcReply(4, None, 2, repeated=True)
    assert desk.state.log == ["prepare 2", "commit 2"]


def test_it_waits_until_it_is_ready(desk: Desk) -> None:
    desk.state.ready = False
    assert desk.phase(RpcPhase.PREPARE, 2, "k") is None
    desk.calls.answer_pending()
    assert desk.replies == []
    desk.state.ready = True
    desk.calls.answer_pending()
    assert desk.replies == [(0, RpcReply(1))]


def test_a_decision_is_carried_out_by_who_did_not_prepare(desk: Desk) -> None:
    assert desk.phase(RpcPhase.COMMIT, 2, "k", version=1) == RpcReply(1, None, 2)


def test_one_change_at_a_time(desk: Desk) -> None:
    desk.phase(RpcPhase.PREPARE, 2, "k")
    reply = desk.phase(RpcPhase.PREPARE, 1, "other", server=1)
    assert "another change of level is under way, with the key 'k'" in error_of(reply)
    desk.phase(RpcPhase.ABORT, 2, "k")
    assert desk.state.log == ["prepare 2", "abort 2"]
    assert desk.phase(RpcPhase.PREPARE, 1, "other", server=1) == RpcReply(4)


def test_an_abort_of_something_else_changes_nothing(desk: Desk) -> None:
    desk.phase(RpcPhase.PREPARE, 2, "k")
    assert desk.phase(RpcPhase.ABORT, 2, "other") == RpcReply(2)
    assert desk.phase(RpcPhase.ABORT, 2, "k", server=1) == RpcReply(3)  # who did not ask for it
    assert desk.state.log == ["prepare 2"]


def test_what_fails_to_prepare_holds_nothing(desk: Desk) -> None:
    assert error_of(desk.phase(RpcPhase.PREPARE, 13, "k")) == "MemoryError: no room"
    assert desk.phase(RpcPhase.PREPARE, 2, "other") == RpcReply(2)
    assert error_of(desk.phase(RpcPhase.COMMIT, 13, "third", version=1)) == "MemoryError: no room"
    assert desk.state.log == ["prepare 2", "abort 2"]
    assert desk.phase(RpcPhase.COMMIT, 2, "fourth", version=2) == RpcReply(4, None, 2)


def test_a_decision_takes_the_place_of_what_is_prepared(desk: Desk) -> None:
    desk.state.ready = False
    desk.phase(RpcPhase.PREPARE, 2, "k")
    desk.state.ready = True
    assert desk.phase(RpcPhase.COMMIT, 1, "other", server=1, version=1) == RpcReply(2, None, 1)
    desk.calls.answer_pending()
    (_, lost) = desk.replies[0]
    assert "another change of level has taken its place" in error_of(lost)
    assert desk.state.log == ["prepare 2", "abort 2", "prepare 1", "commit 1"]


def test_a_late_decision_changes_nothing(desk: Desk) -> None:
    desk.phase(RpcPhase.COMMIT, 2, "k", version=5)
    assert "a later change of level has taken its place" in error_of(
        desk.phase(RpcPhase.COMMIT, 1, "other", version=4)
    )
    assert desk.state.level == 2


def test_what_only_those_asked_for_that_are_gone_is_given_up(desk: Desk) -> None:
    desk.phase(RpcPhase.PREPARE, 2, "k")
    desk.phase(RpcPhase.PREPARE, 2, "k", server=1)
    desk.calls.drop_server(0)
    assert desk.state.log == ["prepare 2"]
    desk.calls.drop_server(1)
    assert desk.state.log == ["prepare 2", "abort 2"]


def test_those_that_are_gone_get_no_answer(desk: Desk) -> None:
    desk.state.ready = False
    desk.phase(RpcPhase.PREPARE, 2, "k")
    desk.calls.drop_server(0)
    desk.state.ready = True
    desk.calls.answer_pending()
    assert desk.replies == []


def test_a_state_that_there_is_not(desk: Desk) -> None:
    reply = desk.ask("colour", key="k", phase=RpcPhase.PREPARE)
    assert "no state 'colour'" in error_of(reply)


# -- bounds


def test_a_result_that_is_too_large_fails_the_call() -> None:
    desk = Desk()
    call = RpcCall(1, "echo", {"a": "x" * MAX_CALL_BYTES}, key="k")
    desk.calls.handle(0, call)
    desk.calls.handle(0, call)
    for _, reply in desk.replies:
        assert reply.result is None
        assert reply.error is not None
        assert reply.error.endswith(f"at most {MAX_CALL_BYTES} are sent")
    assert desk.runs == ["echo"], "it ran once, whatever its result"


def test_calls_of_one_api_server_that_wait_are_bounded() -> None:
    desk = Desk()
    desk.state.ready = False
    for number in range(MAX_WAITING_CALLS + 2):
        desk.calls.handle(0, RpcCall(number, "level", {"level": 1}, "k", RpcPhase.PREPARE))
    assert [reply.call for _, reply in desk.replies] == [MAX_WAITING_CALLS, MAX_WAITING_CALLS + 1]
    assert desk.replies[0][1].error == "64 calls of this API server wait already"
    desk.replies.clear()
    desk.calls.handle(1, RpcCall(0, "level", {"level": 1}, "k", RpcPhase.PREPARE))
    assert desk.replies == []
    desk.state.ready = True
    desk.calls.answer_pending()
    assert len(desk.replies) == MAX_WAITING_CALLS + 1


def test_a_change_that_cannot_be_undone_does_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk()
    desk.state.ready = False
    desk.calls.handle(0, RpcCall(1, "level", {"level": 1}, "k", RpcPhase.PREPARE))

    def abort() -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(desk.state, "abort", abort)
    desk.calls.drop_server(0)
    assert "no room" in caplog.text
