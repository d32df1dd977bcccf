"""Streams whose engine is gone, over a real stream table, without engines or a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from penstock.dispatch.resumption import (
    MAX_FAILED_RESUMES,
    MIN_PROGRESS,
    RESUMED_INTERVAL,
    RETRY_S,
    Resumption,
)
from penstock.metrics.bounds import EVENT_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS
from penstock.metrics.histogram import Histogram
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.row_metrics import RowMetrics
from penstock.streaming.stream import Stream, StreamError
from penstock.streaming.stream_columns import NO_ENGINE
from penstock.streaming.token_log import TokenLog
from penstock.wire.frames import FinishReason, TokenFrame
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import SamplingParams, Submit

PROMPT = np.array([7, 8], "<i4").tobytes()
VOCABULARY = 10
TIMEOUT_S = 60.0


class Reply:
    arrays = False

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.errors: list[StreamError] = []
        self.finish = FinishReason.NONE

    def on_row(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        self.tokens += tokens
        self.finish = finish

    def on_resumed(self, rank: int, position: int) -> None:
        pass

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        self.errors.append(error)


class Host:
    """A table and engines that take what they are given; ``up`` are the ranks that do."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        metrics = RowMetrics(Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), Histogram(EVENT_BOUNDS))
        log = TokenLog() if timeout_s else None
        self.table = OutputProcessor([None] * VOCABULARY, metrics, log)
        self.outcomes = Counter[str]()
        self.closed = ""
        self.resumption = Resumption(self.table, timeout_s, self.submit, self.outcomes, lambda: self.closed)
        self.up = [1]
        self.submitted: list[Submit] = []

    def submit(self, stream: Stream, request: Submit) -> bool:
        if not self.up:
            return False
        self.table.assign(stream, self.up[0])
        self.submitted.append(request)
        stream.started, stream.submit_number = False, len(self.submitted)
        return True

    def open(self, reply: Reply | None = None, rank: int = 0, **sampling: int) -> Stream:
        stream = Stream(reply or Reply(), 0, rank, lambda data: None)
        self.table.open(stream, 0.0)
        sampled = SamplingParams(100, 3, **sampling)
        stream.request = Submit(stream.handle, PROMPT, sampled, 5, 2, "salt", kv_transfer_params=b"{}")
        return stream

    def deliver(self, stream: Stream, *tokens: int) -> None:
        position = self.table.num_delivered(stream)
        self.table.process_frame(
            stream.rank,
            TokenFrame(
                step=1,
                stream=np.array([stream.handle], np.int32),
                position=np.array([position], np.int32),
                tokens=np.array(tokens, np.int32),
                count=np.array([len(tokens)], np.int32),
            ),
            1.0,
        )

    def lose(self, rank: int, now: float = 0.0, accepted: int = 0) -> None:
        self.resumption.on_lost(rank, "it is gone", now, accepted)


def test_a_stream_goes_on_with_all_it_has_delivered() -> None:
    host, reply = Host(), Reply()
    stream = host.open(reply, prompt_logprobs=1)
    host.deliver(stream, 1, 2)
    host.lose(0)
    (request,) = host.submitted
    assert np.frombuffer(request.prompt, "<i4").tolist() == [7, 8, 1, 2]
    assert request.resumed == 2
    assert request.sampling == SamplingParams(100, 3)  # logprobs of the prompt came with the first token
    assert (request.stream, request.interval, request.priority) == (stream.handle, 5, 2)
    assert request.cache_salt == "salt"
    assert request.kv_transfer_params is None  # the cache it names was fetched once
    host.deliver(stream, 3)
    assert reply.tokens == [1, 2, 3]
    host.up = [0]
    host.lose(1)
    assert np.frombuffer(host.submitted[1].prompt, "<i4").tolist() == [7, 8, 1, 2, 3]
    assert host.outcomes == {"resumed": 2}


def test_a_stream_without_tokens_is_submitted_as_it_was() -> None:
    host = Host()
    stream = host.open(prompt_logprobs=1)
    host.lose(0)
    assert stream.request is not None
    assert host.submitted == [msgspec.structs.replace(stream.request, resubmitted=True)]


def test_streams_of_other_engines_do_not_notice() -> None:
    host = Host()
    stream = host.open(rank=1)
    host.lose(0)
    assert host.submitted == []
    assert stream.rank == 1


def test_waits_for_an_engine_and_no_longer_than_allowed() -> None:
    host, replies = Host(), [Reply(), Reply()]
    host.up = []
    early = host.open(replies[0])
    host.deliver(early, 4)
    host.lose(0, now=10.0)
    late = host.open(replies[1])
    host.lose(0, now=20.0)
    host.resumption.tick(10.0 + TIMEOUT_S - 0.1)
    assert replies[0].errors == []
    host.resumption.tick(10.0 + TIMEOUT_S)
    ((error,), none) = (reply.errors for reply in replies)
    assert (error.status, error.code) == (503, "engine_died")
    assert "60 s (--resume-timeout)" in error.message
    assert none == []
    host.up = [1]
    host.resumption.on_engine()
    assert [request.stream for request in host.submitted] == [late.handle]
    host.resumption.tick(1000.0)
    assert replies[1].errors == []
    assert host.outcomes == {"expired": 1, "resumed": 1}
    assert len(host.table) == 1


def test_a_stream_that_leaves_while_it_waits_is_forgotten() -> None:
    host, reply = Host(), Reply()
    host.up = []
    stream = host.open(reply)
    host.lose(0)
    assert stream.rank == NO_ENGINE
    host.table.close(stream)
    again = host.open(rank=1)
    assert again.handle == stream.handle
    host.up = [1]
    host.resumption.on_engine()
    assert host.submitted == []
    assert reply.errors == []


def test_without_resumption_streams_end_with_their_engine() -> None:
    host, reply = Host(timeout_s=0), Reply()
    host.open(reply)
    host.lose(0)
    host.resumption.on_engine()
    assert [(error.status, error.code, error.message) for error in reply.errors] == [
        (503, "engine_died", "it is gone")
    ]
    assert host.submitted == []
    assert len(host.table) == 0


def test_a_stream_that_seems_to_end_engines_is_given_up() -> None:
    host, poison, innocent = Host(), Reply(), Reply()
    streams = [host.open(poison), host.open(innocent)]
    host.lose(0)
    for loss in range(MAX_FAILED_RESUMES):
        assert poison.errors == []
        host.deliver(streams[1], 5)
        host.up = [loss % 2]
        host.lose(1 - loss % 2)
    (error,) = poison.errors
    assert error.code == "engine_died"
    assert "not tried again" in error.message
    assert innocent.errors == []
    assert host.outcomes["given_up"] == 1
    assert len(host.table) == 1


def test_streams_that_only_waited_in_the_queues_of_lost_engines_are_no_suspects() -> None:
    host, replies = Host(), [Reply() for _ in range(8)]
    for reply in replies:
        host.open(reply)
    host.lose(0)
    for loss in range(3 * MAX_FAILED_RESUMES):
        host.up = [loss % 2]
        host.lose(1 - loss % 2, accepted=len(host.submitted))
        assert len(host.submitted) == len(replies) * (loss + 2)  # all of them, not one by one
    assert not any(reply.errors for reply in replies)


def test_a_stream_that_started_in_the_last_step_of_engines_is_given_up_and_those_behind_it_are_not() -> None:
    host, poison, innocent = Host(), Reply(), Reply()
    first, _ = host.open(poison), host.open(innocent)
    host.lose(0)
    for loss in range(MAX_FAILED_RESUMES):
        first.started = True
        host.up = [loss % 2]
        host.lose(1 - loss % 2, accepted=len(host.submitted))
    assert [error.code for error in poison.errors] == ["engine_died"]
    assert innocent.errors == []
    assert host.outcomes["given_up"] == 1


def test_a_stream_that_finds_no_memory_is_submitted_again_later() -> None:
    host, reply = Host(), Reply()
    stream = host.open(reply)
    host.lose(0)
    host.resumption.on_refused(stream, 10.0)
    assert host.table.is_unassigned(stream)
    host.resumption.tick(10.0 + RETRY_S - 0.1)
    assert len(host.submitted) == 1
    host.resumption.tick(10.0 + RETRY_S)
    assert len(host.submitted) == 2
    assert reply.errors == []
    host.resumption.on_refused(stream, 20.0)
    host.up = []
    host.resumption.tick(20.0 + TIMEOUT_S)
    assert [error.code for error in reply.errors] == ["engine_died"]


def lose_repeatedly(host: Host, stream: Stream, tokens: int) -> None:
    """Loses engines in turn; every other one gives the stream some tokens first."""
    for loss in range(3 * MAX_FAILED_RESUMES):
        host.lose(loss % 2)
        host.up = [loss % 2]
        if loss % MAX_FAILED_RESUMES == 0 and host.table.is_running(stream):
            host.deliver(stream, *[1] * tokens)


def test_progress_in_between_clears_a_stream() -> None:
    host, reply = Host(), Reply()
    lose_repeatedly(host, host.open(reply), MIN_PROGRESS)
    assert reply.errors == []


def test_the_first_token_alone_is_no_progress() -> None:
    """An engine sends it at once, and holds the next ones of a stream whose rows are far apart."""
    host, reply = Host(), Reply()
    lose_repeatedly(host, host.open(reply), 1)
    assert [error.code for error in reply.errors] == ["engine_died"]


def test_a_resumed_stream_has_its_rows_close_to_each_other() -> None:
    host = Host()
    stream = host.open()
    assert stream.request is not None
    stream.request = msgspec.structs.replace(stream.request, interval=256, interval_ms=60_000)
    host.deliver(stream, 1)
    host.lose(0)
    host.up = [0]
    host.lose(1)
    assert [(request.interval, request.interval_ms) for request in host.submitted] == [
        (RESUMED_INTERVAL, 60_000),
        (1, 0),  # a suspect
    ]


def test_a_stream_that_cannot_be_submitted_ends_and_the_others_go_on() -> None:
    host, replies = Host(), [Reply() for _ in range(3)]
    streams = [host.open(reply) for reply in replies]
    submit = host.resumption._submit

    def break_at_second(stream: Stream, request: Submit) -> bool:
        if stream is streams[1]:
            raise OverflowError("cannot be encoded")
        return submit(stream, request)

    host.resumption._submit = break_at_second
    host.lose(0)
    assert [[error.code for error in reply.errors] for reply in replies] == [[], ["internal_error"], []]
    assert [request.stream for request in host.submitted] == [streams[0].handle, streams[2].handle]


def test_a_suspect_that_waits_for_its_engine_does_not_hold_up_the_others() -> None:
    host = Host()
    pinned, free = host.open(), host.open()
    pinned.pinned_rank = 0
    for stream in (pinned, free):
        stream.failed_resumes, stream.resumed_at = MAX_FAILED_RESUMES - 2, 0

    def submit(stream: Stream, request: Submit) -> bool:
        return stream is free and host.submit(stream, request)

    host.resumption._submit = submit
    host.lose(0)
    assert [request.stream for request in host.submitted] == [free.handle]
    assert host.table.is_unassigned(pinned)


def test_a_suspect_whose_adapter_no_engine_has_does_not_hold_up_the_others() -> None:
    host = Host()
    adapted, plain = host.open(), host.open()
    adapted.request = msgspec.structs.replace(adapted.request, adapter="a", adapter_digest="d")
    for stream in (adapted, plain):
        stream.failed_resumes, stream.resumed_at = MAX_FAILED_RESUMES - 2, 0

    def submit(stream: Stream, request: Submit) -> bool:
        return request.adapter is None and host.submit(stream, request)

    host.resumption._submit = submit
    host.lose(0)
    assert [request.stream for request in host.submitted] == [plain.handle]
    assert host.table.is_unassigned(adapted)


def test_suspects_go_on_one_by_one() -> None:
    host = Host()
    streams = [host.open() for _ in range(3)]
    host.lose(0)
    host.up = [0]
    host.lose(1)
    assert len(host.submitted) == 3 + 1
    host.resumption.tick(2 * TIMEOUT_S)  # the time to wait for an engine does not count with one there
    assert len(host.submitted) == 3 + 1
    host.deliver(streams[0], *[1] * MIN_PROGRESS)
    host.resumption.tick(0.0)
    host.table.close(streams[1])
    host.resumption.tick(0.0)
    assert [request.stream for request in host.submitted[3:]] == [stream.handle for stream in streams]


def test_suspects_wait_for_an_engine_no_longer_than_others() -> None:
    host, reply = Host(), Reply()
    stream = host.open(reply)
    host.lose(0)
    host.up = []
    host.lose(1)
    host.resumption.tick(TIMEOUT_S - 0.1)
    assert host.table.is_unassigned(stream)
    host.resumption.tick(TIMEOUT_S)
    assert host.outcomes == {"resumed": 1, "expired": 1}
    assert len(reply.errors) == 1


@pytest.mark.parametrize("others", [1, 40])
@pytest.mark.parametrize("at", [0, 5])
def test_a_poisonous_stream_ends_three_engines_and_nobody_else(others: int, at: int) -> None:
    """Two engines; the one that is to give the poison its token number ``at`` ends instead."""
    host, replies = Host(), [Reply() for _ in range(others + 1)]
    host.up = [0, 1]
    streams = [host.open(reply, rank=number % 2) for number, reply in enumerate(replies)]
    poison, deaths = streams[0], 0
    while not all(len(reply.tokens) == 10 for reply in replies[1:]):
        for rank in (0, 1):
            mine = [stream for stream in streams if host.table.is_running(stream) and stream.rank == rank]
            if poison in mine and host.table.num_delivered(poison) == at:
                deaths += 1
                host.up = [1 - rank]  # back when the other one has taken over
                host.lose(rank)
                host.up = [rank, 1 - rank]
                host.resumption.on_engine()
                continue
            for stream in mine:
                if len(replies[streams.index(stream)].tokens) < 10:
                    host.deliver(stream, 1)
        host.resumption.tick(0.0)
    assert deaths == 3
    assert [len(reply.errors) for reply in replies] == [1] + [0] * others


def test_choices_of_a_request_that_failed_are_not_resumed() -> None:
    host = Host()

    class Sibling(Reply):
        def on_failure(self, stream: Stream, error: StreamError) -> None:
            super().on_failure(stream, error)
            host.table.close(second)

    first, second = host.open(Sibling()), host.open()
    for stream in (first, second):
        stream.resumed_at, stream.failed_resumes, stream.started = 0, MAX_FAILED_RESUMES - 1, True
    second.failed_resumes = 0
    host.lose(0)
    assert host.submitted == []
    assert host.outcomes == {"given_up": 1}


@pytest.mark.parametrize("waiting", [True, False])
def test_the_end_of_the_server_ends_everything(waiting: bool) -> None:
    host, reply = Host(), Reply()
    host.up = []
    host.open(reply)
    if waiting:
        host.lose(0)
    host.resumption.close("stopped")
    host.lose(0)
    message = "stopped" if waiting else "it is gone"
    assert [(error.code, error.message) for error in reply.errors] == [("server_stopped", message)]
    assert len(host.table) == 0


@pytest.mark.parametrize("suspect", [True, False])
def test_whoever_waits_for_an_engine_ends_once_the_server_is_to_sleep(suspect: bool) -> None:
    host, reply = Host(), Reply()
    stream = host.open(reply)
    stream.failed_resumes = int(suspect)
    host.up = []
    host.lose(0)
    host.resumption.tick(1.0)
    assert reply.errors == []
    host.closed = "sleeping"
    host.resumption.tick(1.1)
    assert [(error.status, error.code) for error in reply.errors] == [(503, "sleeping")]
    assert not host.resumption.waits
    assert host.outcomes == {"ended": 1}
    assert len(host.table) == 0


@pytest.mark.parametrize("suspect", [True, False])
def test_whoever_waits_for_an_engine_ends_with_what_it_has_once_the_server_is_paused(suspect: bool) -> None:
    host, reply = Host(), Reply()
    stream = host.open(reply)
    host.deliver(stream, 1, 2)
    stream.failed_resumes = int(suspect)
    host.up = []
    host.lose(0)
    host.closed = "paused"
    host.resumption.tick(1.1)
    assert reply.errors == []
    assert (reply.tokens, reply.finish) == ([1, 2], FinishReason.ABORT)
    assert not host.resumption.waits
    assert host.outcomes == {"ended": 1}
    assert len(host.table) == 0
