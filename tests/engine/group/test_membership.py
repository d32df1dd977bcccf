"""What an engine tells the coordinator, and when."""

from __future__ import annotations

import pytest

from penstock.engine.base import Load
from penstock.engine.group.membership import JOIN_INTERVAL_S, REPORT_INTERVAL_S, EngineMembership
from penstock.wire.coordination import (
    COORDINATOR_PROTOCOL_VERSION,
    EngineJoin,
    EngineReport,
    FromMember,
    JoinAccepted,
    JoinRejected,
    JoinRejectedError,
    MemberLeave,
    Rejoin,
    decode_from_member,
)
from penstock.wire.messages import encode

JOIN = EngineJoin(COORDINATOR_PROTOCOL_VERSION, 3, 1, 7, "tcp://10.0.0.3:5000", {"dtype": "float32"})


class FakeLink:
    """Remembers what was sent; has no room while ``full``."""

    def __init__(self) -> None:
        self.sent: list[FromMember] = []
        self.incoming: list[bytes] = []
        self.strangers: list[bool] = []
        """What refused() says, in order."""
        self.full = self.closed = False

    def send(self, part: bytes) -> bool:
        if not self.full:
            self.sent.append(decode_from_member(part))
        return not self.full

    def receive(self) -> bytes | None:
        return self.incoming.pop(0) if self.incoming else None

    def reconnect_if_silent(self, now: float) -> None:
        pass

    def refused(self) -> bool:
        return self.strangers.pop(0) if self.strangers else False

    def wait(self, timeout_s: float) -> bool:
        return bool(self.incoming)

    def close(self) -> None:
        self.closed = True

    def take(self) -> list[FromMember]:
        sent, self.sent = self.sent, []
        return sent


def made() -> tuple[FakeLink, EngineMembership]:
    link = FakeLink()
    return link, EngineMembership(link, JOIN, "tcp://head:5000")


def test_it_joins_and_reports_changes_alone() -> None:
    link, membership = made()
    membership.poll(0.0, Load(1, 2, 0.5), {0: 3, 7: 1}, 9, idle=True)
    assert link.take() == [JOIN, EngineReport(9, 1, 2, 0.5, [0, 3, 7, 1])]
    membership.poll(0.9, Load(1, 2, 0.5), {0: 3, 7: 1}, 20, idle=True)
    assert link.take() == []
    membership.poll(0.9, Load(0, 2, 0.5), {0: 3, 7: 1}, 21, idle=True)
    assert link.take() == [EngineReport(21, 0, 2, 0.5, [0, 3, 7, 1])]


def test_a_busy_engine_does_not_report_too_often() -> None:
    link, membership = made()
    membership.poll(0.0, Load(1), {}, 1, idle=False)
    link.take()
    membership.poll(REPORT_INTERVAL_S / 2, Load(2), {}, 2, idle=False)
    assert link.take() == []
    membership.poll(REPORT_INTERVAL_S, Load(2), {}, 3, idle=False)
    assert link.take() == [EngineReport(3, 2, 0, 0, [])]
    membership.poll(REPORT_INTERVAL_S, Load(0), {}, 4, idle=True)
    assert link.take() == [EngineReport(4, 0, 0, 0, [])], "idle, it has the time"


def test_a_restarted_coordinator_is_told_again() -> None:
    link, membership = made()
    membership.poll(0.0, Load(1), {}, 1, idle=True)
    link.take()
    link.incoming.append(encode(Rejoin()))
    membership.poll(0.5, Load(1), {}, 1, idle=True)
    assert link.take() == [JOIN, EngineReport(1, 1, 0, 0, [])]


def test_it_says_from_time_to_time_that_it_is_there() -> None:
    link, membership = made()
    membership.poll(0.0, Load(), {}, 1, idle=True)
    link.take()
    membership.poll(JOIN_INTERVAL_S, Load(), {}, 1, idle=True)
    assert link.take() == [JOIN]


def test_an_engine_waits_until_it_is_taken() -> None:
    link, membership = made()
    said: list[str] = []

    def progress(text: str, fraction: float | None) -> None:
        said.append(text)
        link.incoming.append(encode(JoinAccepted()))

    membership.wait_until_joined(progress)
    assert link.take() == [JOIN, JOIN]
    assert said == ["waiting for the coordinator at tcp://head:5000"]


def test_another_key_is_told_from_a_coordinator_that_is_away() -> None:
    link, membership = made()
    link.strangers = [True, True, False, True, True, True]
    with pytest.raises(JoinRejectedError, match="--cluster-key-file"):
        membership.wait_until_joined(lambda text, fraction: None)
    assert link.strangers == []


def test_an_engine_that_ends_leaves() -> None:
    link, membership = made()
    membership.close()
    assert link.take() == [MemberLeave()]
    assert link.closed


def test_what_found_no_room_is_told_later() -> None:
    link, membership = made()
    link.full = True
    membership.poll(0.0, Load(1), {}, 1, idle=True)
    link.full = False
    membership.poll(0.0, Load(1), {}, 1, idle=True)
    assert link.take() == [JOIN, EngineReport(1, 1, 0, 0, [])]


def test_a_refusal_is_final() -> None:
    link, membership = made()
    link.incoming += [b"nonsense", encode(JoinRejected("too old"))]
    with pytest.raises(JoinRejectedError, match="too old"):
        membership.poll(0.0, Load(1), {}, 1, idle=True)
    assert link.take() == []


def test_it_belongs_to_the_head_that_has_accepted_it_last() -> None:
    link, membership = made()
    assert membership.current_head() == 0
    link.incoming += [encode(JoinAccepted(9)), encode(JoinAccepted(4))]
    assert membership.current_head() == 4
    link.incoming.append(encode(Rejoin()))
    assert membership.current_head() == 4
