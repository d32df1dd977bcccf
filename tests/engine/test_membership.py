"""What an engine tells the coordinator, and when."""

from penstock.engine.base import Load
from penstock.engine.membership import REPORT_INTERVAL_S, Membership
from penstock.wire.coordination import (
    PROTOCOL_VERSION,
    EngineJoin,
    EngineReport,
    FromMember,
    Refused,
    Rejoin,
    decode_from_member,
)
from penstock.wire.messages import encode

JOIN = EngineJoin(PROTOCOL_VERSION, 3, 1)


class FakeLink:
    """Remembers what was sent; has no room while ``full``."""

    def __init__(self) -> None:
        self.sent: list[FromMember] = []
        self.incoming: list[bytes] = []
        self.full = False

    def send(self, part: bytes) -> bool:
        if not self.full:
            self.sent.append(decode_from_member(part))
        return not self.full

    def receive(self) -> bytes | None:
        return self.incoming.pop(0) if self.incoming else None

    def close(self) -> None:
        raise AssertionError("it is not to be closed")

    def take(self) -> list[FromMember]:
        sent, self.sent = self.sent, []
        return sent


def made() -> tuple[FakeLink, Membership]:
    link = FakeLink()
    return link, Membership(link, 3, 1)


def test_it_joins_and_reports_changes_alone() -> None:
    link, membership = made()
    membership.turn(0.0, Load(1, 2, 0.5), {0: 3, 7: 1}, 9, idle=True)
    assert link.take() == [JOIN, EngineReport(9, 1, 2, 500, [0, 3, 7, 1])]
    membership.turn(50.0, Load(1, 2, 0.5), {0: 3, 7: 1}, 20, idle=True)
    assert link.take() == []
    membership.turn(50.0, Load(0, 2, 0.5), {0: 3, 7: 1}, 21, idle=True)
    assert link.take() == [EngineReport(21, 0, 2, 500, [0, 3, 7, 1])]


def test_a_busy_engine_does_not_report_too_often() -> None:
    link, membership = made()
    membership.turn(0.0, Load(1), {}, 1, idle=False)
    link.take()
    membership.turn(REPORT_INTERVAL_S / 2, Load(2), {}, 2, idle=False)
    assert link.take() == []
    membership.turn(REPORT_INTERVAL_S, Load(2), {}, 3, idle=False)
    assert link.take() == [EngineReport(3, 2, 0, 0, [])]
    membership.turn(REPORT_INTERVAL_S, Load(0), {}, 4, idle=True)
    assert link.take() == [EngineReport(4, 0, 0, 0, [])], "idle, it has the time"


def test_a_restarted_coordinator_is_told_again() -> None:
    link, membership = made()
    membership.turn(0.0, Load(1), {}, 1, idle=True)
    link.take()
    link.incoming.append(encode(Rejoin()))
    membership.turn(1.0, Load(1), {}, 1, idle=True)
    assert link.take() == [JOIN, EngineReport(1, 1, 0, 0, [])]


def test_what_found_no_room_is_told_later() -> None:
    link, membership = made()
    link.full = True
    membership.turn(0.0, Load(1), {}, 1, idle=True)
    link.full = False
    membership.turn(0.0, Load(1), {}, 1, idle=True)
    assert link.take() == [JOIN, EngineReport(1, 1, 0, 0, [])]


def test_a_refusal_is_final() -> None:
    link, membership = made()
    link.incoming += [b"nonsense", encode(Refused("too old"))]
    membership.turn(0.0, Load(1), {}, 1, idle=True)
    assert link.take() == []
