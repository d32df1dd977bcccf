"""Calls on an engine, without an engine: runs and receipts."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.engine.loop.rpc import RpcServer
from penstock.wire.messages import MAX_CALL_BYTES, RpcCall, RpcReply


class Desk:
    def __init__(self) -> None:
        self.runs: list[str] = []
        self.replies: list[tuple[int, RpcReply]] = []
        self.step = 0
        self.calls = RpcServer(self.run, self.reply, lambda: self.step)
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
