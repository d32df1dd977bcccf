"""Messages that are well formed and ask for too much, and the streams of others meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.engine.schedule.waiting_queue import BYTES_PER_REQUEST, WaitingQueue
from penstock.wire.frames import FinishReason
from penstock.wire.messages import MAX_ABORTED, Abort, Disconnect, GoAway
from tests.engine.loop.test_process_end import Child
from tests.engine.loops import ENDLESS, Host
from tests.engine.peers import ApiServer
from tests.engine.support import submit
from tests.integration.server import wait_until

LAST_HANDLE = (1 << 31) - 1


def test_a_high_handle_takes_no_more_memory_than_a_low_one(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    served = host()
    peer, other = connect(0), connect(1)
    other.send(submit(1, 200))
    peer.send(submit(LAST_HANDLE, 20, seed=1), submit((1 << 22) - 1, ENDLESS), submit(1, 5))
    peer.read_ends(LAST_HANDLE, 1)
    peer.send(Abort([(1 << 22) - 1]))
    received = peer.read_ends((1 << 22) - 1)
    assert received.finish[(1 << 22) - 1] == FinishReason.ABORT
    assert (len(received.tokens[LAST_HANDLE]), len(received.tokens[1])) == (20, 5)
    assert len(other.read_ends(1).tokens[1]) == 200
    assert served.loop._stats._table.nbytes < 1 << 20


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_tokens": LAST_HANDLE},
        {"min_tokens": LAST_HANDLE, "max_tokens": LAST_HANDLE},
        {"seed": (1 << 63) - 1},
        {"stop_token_ids": (LAST_HANDLE,) * 9},
        {"logprobs": 260},  # the whole vocabulary
        {"top_k": LAST_HANDLE, "temperature": 1e30, "repetition_penalty": 1e300},
    ],
    ids=str,
)
def test_the_largest_values_of_fields(
    host: Callable[..., Host], connect: Callable[..., ApiServer], sampling: dict[str, Any]
) -> None:
    served = host(max_model_len=64)
    peer, other = connect(0), connect(1)
    other.send(submit(1, 50))
    peer.send(submit(1, **{"max_tokens": 50, **sampling}))
    assert peer.read_ends(1).failed == {}
    assert len(other.read_ends(1).tokens[1]) == 50
    assert served.error is None


@pytest.mark.parametrize("streams", [MAX_ABORTED, MAX_ABORTED + 1, 2_000_000])
def test_an_abort_of_very_many_streams(
    host: Callable[..., Host], connect: Callable[..., ApiServer], streams: int
) -> None:
    served = host()
    peer, other = connect(0), connect(1)
    asked: list[int] = []
    abort = served.engine.abort
    served.engine.abort = lambda server, numbers: (asked.append(len(numbers)), abort(server, numbers))  # type: ignore
    peer.send(submit(5, ENDLESS))
    peer.read(lambda: bool(peer.received.tokens))
    peer.send(Abort(list(range(streams))))
    if streams <= MAX_ABORTED:
        peer.read_ends(5)
        assert asked == [1], "only what runs is looked for"
    else:
        peer.read(lambda: bool(peer.received.others))
        assert isinstance(peer.received.others[0], GoAway)
        assert asked == []
    other.ping()


def test_waiting_requests_are_bounded_in_bytes_per_api_server(
    host: Callable[..., Host], connect: Callable[..., ApiServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.schedule.waiting_queue.MAX_QUEUED_BYTES", 1_000_000)
    served = host(max_num_seqs=1)
    peer, other = connect(0), connect(1)
    peer.send(submit(0, ENDLESS))
    peer.read(lambda: bool(peer.received.tokens))
    peer.send(*(submit(1 + stream, 5, prompt=[40] * 10_000) for stream in range(60)))
    peer.read(lambda: len(peer.received.failed) == 60 - 1_000_000 // (40_000 + BYTES_PER_REQUEST + 33))
    assert {failure.code for failure in peer.received.failed.values()} == {"overloaded"}
    other.send(submit(1, 5))
    peer.send(Abort([0]))
    other.read_ends(1)
    peer.read_ends(*range(61))
    queue: WaitingQueue = served.engine._waiting
    assert queue._bytes.of(0) == 0


def test_a_flood_of_requests_is_freed(
    model_dir: Path, run_dir: str, stack: ExitStack, connect: Callable[..., ApiServer]
) -> None:
    child = Child(model_dir, run_dir, stack, synthetic_step_ms=1, max_model_len=100_000, max_num_seqs=1)
    resident = psutil.Process(child.process.pid).memory_info
    peer = connect(0)
    peer.send(submit(0, ENDLESS))
    peer.read(lambda: bool(peer.received.tokens))
    before = resident().rss
    requests = 1000
    for first in range(0, requests, 100):
        peer.send(*(submit(1 + first + each, 5, prompt=[40] * 8_000) for each in range(100)))
    peer.ping()
    assert resident().rss - before > requests * 32_000
    peer.send(Disconnect())
    wait_until(lambda: resident().rss - before < 0.2 * requests * 32_000, 90, "memory is given back")


def test_more_logprobs_than_the_vocabulary_has_are_refused(
    host: Callable[..., Host], connect: Callable[..., ApiServer]
) -> None:
    served = host(max_model_len=64)
    peer = connect(0)
    peer.send(submit(1, 5, logprobs=1 << 20))
    assert peer.read_ends(1).failed[1].code == "invalid_request"
    assert served.error is None
