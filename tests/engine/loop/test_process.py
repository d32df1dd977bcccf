"""The loop of the engine process while it serves."""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.metrics import families
from penstock.metrics.families import MetricFamily
from penstock.metrics.merge import totals
from penstock.metrics.snapshot import Distribution, Labels, Value, decode_snapshot
from penstock.wire.control import ChildReport, Heartbeat, Stop
from penstock.wire.frames import FinishReason
from penstock.wire.messages import Abort, Disconnect, GoAway, Started
from tests.engine.loops import ENDLESS, Host
from tests.engine.peers import DEADLINE_S, ApiServer
from tests.engine.support import submit
from tests.metrics.views import view_of

# -- streams


def test_every_token_in_order_and_one_end(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    host(max_num_seqs=16)
    peer = connect()
    peer.send(*(submit(stream, 5 + stream) for stream in range(40)))
    received = peer.read_ends(*range(40))
    assert {stream: len(tokens) for stream, tokens in received.tokens.items()} == {
        stream: 5 + stream for stream in range(40)
    }
    assert set(received.finish.values()) == {FinishReason.LENGTH}
    peer.send(submit(3, 8))
    received.tokens.pop(3)
    received.finish.pop(3)
    assert len(peer.read_ends(3).tokens[3]) == 8


def test_welcome(model_dir: Path, run_dir: str, host: Callable[..., Host], stack: ExitStack) -> None:
    served = host()
    peer = ApiServer(run_dir)
    stack.callback(peer.close)
    welcome = peer.hello()
    assert (welcome.rank, welcome.info) == (0, served.engine.info)


def test_interval(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    host(synthetic_step_ms=0)
    peer = connect()
    peer.send(submit(1, 100, interval=10))
    received = peer.read_ends(1)
    assert len(received.tokens[1]) == 100
    assert received.rows == 1 + 9 + 1


def test_abort(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    served = host()
    peer = connect()
    peer.send(submit(1, ENDLESS), submit(2, 20))
    peer.read(lambda: len(peer.received.tokens.get(1, [])) >= 3)
    peer.send(Abort([1, 7]))
    received = peer.read_ends(1, 2)
    assert received.finish == {1: FinishReason.ABORT, 2: FinishReason.LENGTH}
    assert len(received.tokens[1]) < ENDLESS
    peer.ping_until(lambda: served.engine.load().running == 0)


def test_resubmitted_streams_are_announced_when_they_leave_the_queue(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    host(max_num_seqs=1)
    peer = connect()
    peer.send(*(submit(stream, 3, resubmitted=stream > 4) for stream in (4, 5, 6)), submit(7, ENDLESS))
    peer.read(lambda: 7 in peer.received.tokens)
    started = [message.stream for message in peer.received.others if isinstance(message, Started)]
    assert started == [5, 6]


def test_rejected(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    host()
    peer = connect()
    peer.send(submit(1, 0), submit(2, 3))
    received = peer.read_ends(1, 2)
    assert received.failed[1].code == "invalid_request"
    assert "max_tokens: 0" in received.failed[1].message
    assert len(received.tokens[2]) == 3


def test_two_api_servers_with_the_same_handles(
    model_dir: Path, host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    host()
    zero, one = connect(0), connect(1)
    zero.send(*(submit(stream, 20, seed=stream) for stream in range(10)))
    one.send(*(submit(stream, 30, seed=100 + stream) for stream in range(10)))
    mine, theirs = zero.read_ends(*range(10)).tokens, one.read_ends(*range(10)).tokens
    assert {len(tokens) for tokens in mine.values()} == {20}
    assert {len(tokens) for tokens in theirs.values()} == {30}
    assert not {tuple(tokens) for tokens in mine.values()} & {
        tuple(tokens[:20]) for tokens in theirs.values()
    }


def test_calls(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    host()
    peer = connect()
    peer.ping()
    assert "no operation 'fly'" in (peer.call("fly", high=True).error or "")


# -- metrics


def counted(peer: ApiServer, family: MetricFamily) -> dict[Labels, Value]:
    """What the engine's latest snapshot says."""
    snapshots = [decode_snapshot(message.snapshot) for message in peer.received.metrics]
    return totals(view_of(*snapshots)).get(family.name, {})


def test_metrics_come_by_themselves(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    host()
    peer = connect()
    peer.send(*(submit(stream, 20) for stream in range(10)))
    peer.read_ends(*range(10))
    peer.read(lambda: counted(peer, families.GENERATION_TOKENS) == {("", "0"): 200})
    assert counted(peer, families.PROMPT_TOKENS) == {("", "0"): 30}
    assert counted(peer, families.SUCCESS)["", "0", "length"] == 10
    queue_time = counted(peer, families.QUEUE_TIME)["", "0"]
    assert isinstance(queue_time, Distribution)
    assert sum(queue_time.counts) == 10
    latest = peer.received.metrics[-1]
    assert (latest.waiting, latest.running) == (0, 0)


def test_an_api_server_that_comes_later_is_told_as_well(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    host()
    first = connect(0)
    first.send(submit(1, 7))
    first.read_ends(1)
    second = connect(1)
    second.read(lambda: counted(second, families.GENERATION_TOKENS) == {("", "0"): 7})


def test_a_running_engine_reports_again_and_again(
    host: Callable[..., Host], connect: Callable[..., ApiServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.loop.metrics_reporter.REPORT_INTERVAL_S", 0.05)
    host()
    peer = connect()
    peer.send(submit(1, ENDLESS))
    peer.read(lambda: len(peer.received.metrics) >= 5)
    assert peer.received.metrics[-1].running == 1
    sequences = [decode_snapshot(message.snapshot).sequence for message in peer.received.metrics]
    assert sequences == sorted(set(sequences))


def test_the_last_metrics_come_before_the_goodbye(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    served = host()
    peer = connect()
    peer.send(submit(1, ENDLESS))
    peer.read(lambda: len(peer.received.tokens.get(1, [])) >= 10)
    served.supervisor.send(Stop())
    received = peer.read(lambda: bool(peer.received.others))
    assert counted(peer, families.GENERATION_TOKENS) == {("", "0"): len(received.tokens[1])}


# -- peers that misbehave, leave, or do not read


def test_invalid_bytes(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    served = host()
    bad, good = connect(0), connect(1)
    bad.send(submit(1, ENDLESS))
    good.send(submit(1, 100))
    bad.read(lambda: bool(bad.received.tokens))
    bad.link.send([b"\xc1\xff", b""])
    bad.read(lambda: bool(bad.received.others))
    (goodbye,) = bad.received.others
    assert isinstance(goodbye, GoAway)
    assert len(good.read_ends(1).tokens[1]) == 100
    good.ping_until(lambda: served.engine.load().running == 0)
    assert served.error is None


def test_an_api_server_that_dies_frees_its_slots(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    served = host(max_num_seqs=4)
    gone, left = connect(0), connect(1)
    gone.send(*(submit(stream, ENDLESS) for stream in range(8)))
    gone.read(lambda: len(gone.received.tokens) == 4)
    gone.close()
    left.ping_until(lambda: served.engine.load().running == 0)
    left.ping_until(lambda: served.engine.load().waiting == 0)
    left.send(submit(1, 5))
    assert len(left.read_ends(1).tokens[1]) == 5


def test_bye(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    served = host()
    leaving, left = connect(0), connect(1)
    leaving.send(submit(1, ENDLESS))
    leaving.read(lambda: bool(leaving.received.tokens))
    leaving.send(Disconnect())
    left.ping_until(lambda: served.engine.load().running == 0)


def test_a_restarted_api_server(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    served = host()
    before = connect(0, epoch=0)
    before.send(submit(1, ENDLESS), submit(2, ENDLESS))
    before.read(lambda: bool(before.received.tokens))
    after = connect(0, epoch=1)
    after.send(submit(2, 7))
    assert len(after.read_ends(2).tokens[2]) == 7
    assert list(after.received.tokens) == [2]
    after.ping_until(lambda: served.engine.load().running == 0)


def test_a_reader_that_was_stuck_gets_every_token_once(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    streams, tokens, brief = 100, 2000, 50
    served = host(synthetic_step_ms=0)
    stuck, reader = connect(0), connect(1)
    stuck.send(*(submit(stream, tokens) for stream in range(streams)))
    for stream in range(brief):  # its requests are served meanwhile
        reader.send(submit(stream, 10))
        reader.read_ends(stream)
    made = streams * tokens + brief * 10
    reader.ping_until(lambda: served.loop._stats.generation_tokens == made)
    received = stuck.read_ends(*range(streams))
    assert {len(received.tokens[stream]) for stream in range(streams)} == {tokens}
    assert received.failed == {}
    assert received.frames < tokens / 2  # rows were merged, not queued


# -- when it wakes


@pytest.mark.parametrize("busy", [True, False])
def test_the_supervisor_hears_that_the_loop_turns(
    host: Callable[..., Host], connect: Callable[..., ApiServer], busy: bool
) -> None:
    served = host()
    peer = connect()
    if busy:
        peer.send(submit(1, ENDLESS))
        peer.read(lambda: bool(peer.received.tokens))
    reports: list[ChildReport] = []
    while len(reports) < 2:
        assert select.select([served.supervisor], [], [], DEADLINE_S)[0]
        reports += served.supervisor.receive()
    assert set(reports) == {Heartbeat()}


def test_an_idle_engine_waits(host: Callable[..., Host], connect: Callable[..., ApiServer]) -> None:
    served = host()
    peer = connect()
    before = served.socket.waits
    for _ in range(10):
        peer.ping()
    # one wait per message, one more when a wake-up had nothing to say yet, and some to beat
    assert served.socket.waits - before <= 2 * 10 + 10
