"""The publisher with peers whose queues have as much room as the test says."""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.serve import ServeConfig
from penstock.engine.base import Load, StepRows, StreamFailure
from penstock.engine.batch.rows import concat_rows
from penstock.engine.loop import publisher as publisher_module
from penstock.engine.loop.backlog import SEGMENT_TOKENS_PER_ROW, Backlog, FrameBacklog
from penstock.engine.loop.publisher import Publisher
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.wire.arrays import I8, I32
from penstock.wire.decoding import decode_from_engine
from penstock.wire.frames import FinishReason, TokenFrame, decode_frame
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import (
    EngineMetrics,
    FrameHeader,
    GoAway,
    RoutedExperts,
    RpcReply,
    StatesObserved,
)
from penstock.wire.sockets import PeerGone
from tests.engine.support import Received, submit


class Room:
    """An outbox with ``room`` messages for each peer."""

    def __init__(self) -> None:
        self.room: dict[bytes, int] = defaultdict(lambda: 1 << 30)
        self.sent: dict[bytes, list[list[bytes]]] = defaultdict(list)
        self.tries = 0

    def send(self, identity: bytes, parts: list[bytes]) -> bool:
        self.tries += 1
        if self.room[identity] < 0:
            raise PeerGone(identity.decode())
        if not self.room[identity]:
            return False
        self.room[identity] -= 1
        self.sent[identity].append(parts)
        return True

    def received(self, identity: bytes) -> Received:
        received = Received()
        for parts in self.sent[identity]:
            received.parts(parts)
        return received

    def frames(self, identity: bytes) -> list[TokenFrame]:
        frames = []
        for parts in self.sent[identity]:
            header = decode_from_engine(parts[0])
            if isinstance(header, FrameHeader):
                frames.append(decode_frame(header, parts[1]))
        return frames


GONE = -1


def i32(*values: int) -> I32:
    return np.array(values, np.int32)


def step_rows(
    server: list[int],
    stream: list[int],
    position: list[int],
    tokens: list[int],
    finish: list[int] | None = None,
    failed: list[StreamFailure] | None = None,
) -> StepRows:
    ends: I8 | None = None if finish is None else np.array(finish, np.int8)
    return StepRows(i32(*server), i32(*stream), i32(*position), i32(*tokens), None, ends, failed=failed or ())


def no_rows(*failed: StreamFailure) -> StepRows:
    return step_rows([], [], [], [], failed=list(failed))


def left(publisher: Publisher) -> list[int]:
    return [peer.server for peer in publisher.peers.take_disconnected()]


def detach(publisher: Publisher, server: int) -> None:
    peer = publisher.peers.get(server)
    assert peer is not None
    publisher.peers.detach(peer)
    assert left(publisher) == [server]


@pytest.fixture
def outbox() -> Room:
    return Room()


@pytest.fixture
def publisher(outbox: Room) -> Publisher:
    publisher = Publisher(outbox)
    publisher.attach(0, b"zero")
    publisher.attach(1, b"one")
    return publisher


def test_an_offer_reaches_those_that_keep_up(publisher: Publisher, outbox: Room) -> None:
    outbox.room[b"zero"] = 0
    publisher.publish(step_rows([0], [1], [0], [5]), Load())
    publisher.offer_to_all(EngineMetrics(b"1"))
    assert [decode_from_engine(parts[0]) for parts in outbox.sent[b"one"]] == [EngineMetrics(b"1")]
    outbox.room[b"zero"] = 5
    publisher.flush()
    assert outbox.received(b"zero").metrics == []
    publisher.offer_to_all(EngineMetrics(b"2"))
    assert outbox.received(b"zero").metrics == [EngineMetrics(b"2")]
    outbox.room[b"zero"] = GONE
    publisher.offer_to_all(EngineMetrics(b"3"))
    assert left(publisher) == [0]


# -- one frame per API server


def test_one_server(publisher: Publisher, outbox: Room) -> None:
    publisher.publish(step_rows([1, 1], [4, 5], [0, 0], [9, 8]), Load(3, 2, 0.25))
    assert list(outbox.sent) == [b"one"]
    (frame,) = outbox.frames(b"one")
    assert frame.stream.tolist() == [4, 5]
    assert (frame.step, frame.waiting, frame.running, frame.kv_used) == (1, 3, 2, 0.25)


def test_rows_of_several_servers_are_split(publisher: Publisher, outbox: Room) -> None:
    rows = StepRows(
        server=i32(0, 1, 0, 1),
        stream=i32(3, 3, 1, 7),
        position=i32(0, 5, 0, 2),
        tokens=i32(10, 11, 12, 13, 14, 15),
        count=i32(1, 2, 1, 2),
        finish=np.array([0, 0, FinishReason.EOS, 0], np.int8),
        cached=i32(16, 0, 0, 0),
        logprobs=Logprobs(i32(0, 4), i32(10, 14)[:, None], np.array([[-2.0], [-1.0]], np.float32), i32(2, 1)),
        kv_transfer_params={0: {1: b"{}"}},
    )
    publisher.publish(rows, Load(1, 4))
    (zero,), (one,) = outbox.frames(b"zero"), outbox.frames(b"one")
    assert (zero.stream.tolist(), zero.position.tolist(), zero.tokens.tolist()) == ([3, 1], [0, 0], [10, 13])
    assert zero.finish is not None
    assert zero.finish.tolist() == [0, FinishReason.EOS]
    assert zero.cached is not None
    assert zero.cached.tolist() == [16, 0]
    assert zero.logprobs is not None
    assert (zero.logprobs.token.tolist(), zero.logprobs.rank.tolist()) == ([0], [2])
    assert (one.stream.tolist(), one.position.tolist()) == ([3, 7], [5, 2])
    assert (one.tokens.tolist(), one.counts().tolist()) == ([11, 12, 14, 15], [2, 2])
    assert (one.finish, one.cached) == (None, None)
    assert (zero.kv_transfer_params, one.kv_transfer_params) == ({1: b"{}"}, None)
    assert one.logprobs is not None
    assert one.logprobs.token.tolist() == [2]
    assert zero.step == one.step == 1


def test_routed_experts_come_before_the_last_row(publisher: Publisher, outbox: Room) -> None:
    message = RoutedExperts(7, 1, 2, 1, b"\1\2")
    rows = StepRows(i32(1), i32(7), i32(3), i32(5), finish=np.array([FinishReason.EOS], np.int8))
    rows.routed = [(1, message)]
    publisher.publish(rows, Load())
    first, second = outbox.sent[b"one"]
    assert decode_from_engine(first[0]) == message
    assert isinstance(decode_from_engine(second[0]), FrameHeader)


def scored(row: list[int], place: list[int]) -> PromptLogprobs:
    column = i32(*place)
    return PromptLogprobs(i32(*row), column, column[:, None], -column[:, None].astype(np.float32), column)


def test_prompt_logprobs_go_with_their_rows(publisher: Publisher, outbox: Room) -> None:
    publisher.publish(
        StepRows(
            i32(1, 0, 0),
            i32(7, 8, 9),
            i32(0, 0, 3),
            i32(5),
            i32(0, 0, 1),
            prompt=scored([0, 0, 1], [1, 2, 6]),
        ),
        Load(),
    )
    (zero,), (one,) = outbox.frames(b"zero"), outbox.frames(b"one")
    assert zero.prompt is not None
    assert (zero.stream.tolist(), zero.prompt.row.tolist(), zero.prompt.position.tolist()) == (
        [8, 9],
        [0],
        [6],
    )
    assert one.prompt is not None
    assert (one.prompt.row.tolist(), one.prompt.ids.tolist()) == ([0, 0], [[1], [2]])


def test_prompt_logprobs_that_wait_are_merged_in_order_a_bounded_number_of_times(
    publisher: Publisher, outbox: Room
) -> None:
    outbox.room[b"zero"] = 0
    for step in range(300):
        rows = concat_rows(
            [
                StepRows(i32(0), i32(4), i32(0), i32(), i32(0), prompt=scored([0], [step + 1])),
                step_rows([0], [5], [step], [9]),
            ]
        )
        publisher.publish(rows, Load())
    peer = publisher.peers.get(0)
    assert peer is not None
    assert len(peer.backlog._frames) < 12
    outbox.room[b"zero"] = 1000
    publisher.flush()
    frames = outbox.frames(b"zero")
    own = [
        frame.prompt.position[frame.stream[frame.prompt.row] == 4].tolist()
        for frame in frames
        if frame.prompt
    ]
    assert [place for places in own for place in places] == list(range(1, 301))


def test_a_step_without_rows_sends_nothing(publisher: Publisher, outbox: Room) -> None:
    publisher.publish(no_rows(), Load())
    assert not outbox.sent


def test_rows_of_an_unknown_server_go_nowhere(publisher: Publisher, outbox: Room) -> None:
    publisher.publish(step_rows([2, 0], [1, 1], [0, 0], [5, 6]), Load())
    assert list(outbox.sent) == [b"zero"]
    publisher.send(2, GoAway("x"))
    publisher.publish(no_rows(StreamFailure(2, 1, 0, "c", "m")), Load())
    assert list(outbox.sent) == [b"zero"]


def test_failures_follow_the_rows(publisher: Publisher, outbox: Room) -> None:
    rows = step_rows([0, 0], [1, 2], [0, 0], [5, 6], failed=[StreamFailure(0, 2, 1, "engine_error", "broke")])
    publisher.publish(rows, Load())
    received = outbox.received(b"zero")
    assert received.tokens == {1: [5], 2: [6]}
    assert received.failed[2].message == "broke"


# -- a peer that does not read


def test_rows_wait_and_are_merged(publisher: Publisher, outbox: Room) -> None:
    outbox.room[b"zero"] = 0
    for step in range(100):
        publisher.publish(step_rows([0, 1, 0], [4, 4, 5], [step] * 3, [step, 1, 2]), Load(0, step))
    assert len(outbox.frames(b"one")) == 100
    assert publisher.has_backlog
    outbox.room[b"zero"] = 1 << 30
    publisher.flush()
    assert not publisher.has_backlog
    received = outbox.received(b"zero")
    assert received.tokens == {4: list(range(100)), 5: [2] * 100}
    assert received.frames < 12
    assert outbox.frames(b"zero")[-1].running == 99


def test_a_peer_catches_up_in_steps_without_rows_of_its_own(publisher: Publisher, outbox: Room) -> None:
    outbox.room[b"zero"] = 0
    publisher.publish(step_rows([0], [4], [0], [7]), Load())
    publisher.publish(step_rows([0], [4], [1], [8], finish=[FinishReason.EOS]), Load())
    outbox.room[b"zero"] = 9
    publisher.publish(step_rows([1], [4], [0], [9]), Load())
    assert outbox.received(b"zero").tokens == {4: [7, 8]}


def test_a_frame_that_did_not_fit_is_encoded_once(
    publisher: Publisher, outbox: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox.room[b"zero"] = 0
    publisher.publish(step_rows([0], [4], [0], [7]), Load())
    publisher.publish(step_rows([0], [4], [1], [8]), Load())
    encoded = []
    monkeypatch.setattr("penstock.engine.loop.publisher.encode_frame", encoded.append)
    tries = outbox.tries
    for _ in range(10):
        publisher.flush()
    assert (outbox.tries - tries, encoded) == (10, [])


def test_messages_do_not_overtake_rows(publisher: Publisher, outbox: Room) -> None:
    outbox.room[b"zero"] = 0
    publisher.publish(step_rows([0, 0], [4, 5], [0, 0], [7, 8]), Load())
    failure = StreamFailure(0, 5, 2, "engine_error", "broke")
    publisher.publish(step_rows([0, 0], [4, 5], [1, 1], [7, 8], failed=[failure]), Load())
    publisher.publish(step_rows([0], [4], [2], [7]), Load())
    publisher.send_to_all(GoAway("over"))
    for _ in range(10):
        outbox.room[b"zero"] = 1
        publisher.flush()
    assert not publisher.has_backlog
    received = outbox.received(b"zero")
    assert received.tokens == {4: [7, 7, 7], 5: [8, 8]}
    assert received.failed[5].position == 2
    assert received.others == [GoAway("over")]
    assert decode_from_engine(outbox.sent[b"zero"][-1][0]) == GoAway("over")
    assert outbox.received(b"one").others == [GoAway("over")]


def test_frames_of_other_weights_come_behind_the_message_that_tells_of_them(
    publisher: Publisher, outbox: Room
) -> None:
    outbox.room[b"zero"] = 0
    for step in range(9):
        publisher.publish(step_rows([0], [4], [step], [10 + step]), Load())
        if step in (2, 5):
            publisher.send(0, StatesObserved([]))
            publisher.on_weights(step)
    outbox.room[b"zero"] = 1 << 30
    publisher.flush()
    told = 0
    tokens: dict[tuple[int, int], list[int]] = {}
    for parts in outbox.sent[b"zero"]:
        header = decode_from_engine(parts[0])
        if isinstance(header, FrameHeader):
            frame = decode_frame(header, parts[1])
            tokens.setdefault((told, frame.weights), []).extend(frame.tokens.tolist())
        else:
            told += 1
    assert tokens == {(0, 0): [10, 11, 12], (1, 2): [13, 14, 15], (2, 5): [16, 17, 18]}
    assert not publisher.has_backlog


def test_a_message_is_encoded_when_it_is_given(publisher: Publisher, outbox: Room) -> None:
    outbox.room[b"zero"] = 0
    result = {"running": 1.0}
    publisher.send(0, RpcReply(1, None, result))
    publisher.send(0, RpcReply(2, None, result))
    result["running"] = 2.0
    outbox.room[b"zero"] = 9
    publisher.flush()
    assert outbox.received(b"zero").others == [
        RpcReply(1, None, {"running": 1.0}),
        RpcReply(2, None, {"running": 1.0}),
    ]


# -- peers come and go


def test_a_peer_that_is_gone_is_named_once(publisher: Publisher, outbox: Room) -> None:
    outbox.room[b"zero"] = GONE
    publisher.publish(step_rows([0, 1], [1, 1], [0, 0], [5, 6]), Load())
    publisher.publish(step_rows([0, 1], [1, 1], [1, 1], [5, 6]), Load())
    assert left(publisher) == [0]
    assert left(publisher) == []
    assert outbox.received(b"one").tokens == {1: [6, 6]}


def test_a_peer_that_is_gone_while_rows_wait(publisher: Publisher, outbox: Room) -> None:
    outbox.room[b"zero"] = 0
    for step in range(3):
        publisher.publish(step_rows([0], [1], [step], [5]), Load())
    outbox.room[b"zero"] = GONE
    publisher.flush()
    assert left(publisher) == [0]
    assert not publisher.has_backlog


def test_a_successor_does_not_get_what_waited_for_its_predecessor(publisher: Publisher, outbox: Room) -> None:
    outbox.room[b"zero"] = 0
    publisher.publish(step_rows([0], [1], [0], [5]), Load())
    detach(publisher, 0)
    publisher.attach(0, b"zero again")
    publisher.publish(step_rows([0], [9], [0], [6]), Load())
    assert outbox.received(b"zero again").tokens == {9: [6]}


def test_a_refused_peer_is_told_as_soon_as_its_queue_has_room(publisher: Publisher, outbox: Room) -> None:
    outbox.room[b"left"] = GONE
    assert not publisher.reject_peer(b"left", "why")
    assert publisher.reject_peer(b"stranger", "why")
    assert outbox.received(b"stranger").others == [GoAway("why")]
    assert not publisher.has_backlog
    outbox.room[b"full"] = outbox.room[b"fuller"] = 0
    assert publisher.reject_peer(b"full", "why")
    assert publisher.reject_peer(b"fuller", "why")
    assert publisher.has_backlog
    outbox.room[b"full"] = 1
    publisher.flush()
    assert outbox.received(b"full").others == [GoAway("why")]
    outbox.room[b"fuller"] = GONE
    publisher.flush()
    assert not publisher.has_backlog
    assert left(publisher) == []


def test_a_refused_peer_that_starts_over_is_not_told_late(publisher: Publisher, outbox: Room) -> None:
    outbox.room[b"two"] = 0
    publisher.reject_peer(b"two", "why")
    publisher.attach(2, b"two")
    outbox.room[b"two"] = 9
    publisher.flush()
    assert outbox.received(b"two").others == []


def test_a_peer_that_does_not_read_is_detached_when_its_backlog_is_too_large(
    publisher: Publisher, outbox: Room, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publisher_module, "MAX_BACKLOG_BYTES", 20_000)
    outbox.room[b"zero"] = 1
    step = 0
    while publisher.peers.get(0) is not None:
        publisher.publish(step_rows([0, 1], [1, 1], [step, step], [5, 6]), Load())
        step = publisher.step
    assert 2_000 < step < 6_000, "a token of a long stream takes four bytes"
    assert left(publisher) == [0]
    assert len(outbox.received(b"one").tokens[1]) == step
    for call in range(100):
        publisher.send(1, RpcReply(call, None, "x" * 100))
    outbox.room[b"one"] = 0
    for call in range(2000):
        publisher.send(1, RpcReply(call, None, "x" * 100))
    assert left(publisher) == [1]
    outbox.room[b"zero"] = outbox.room[b"one"] = 9
    publisher.flush()
    assert outbox.received(b"zero").others == [GoAway("it did not read what the engine sent")]
    assert len(caplog.records) == 2


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["frame", "switch", "message", "take", "back"]), max_size=60))
def test_the_size_of_a_backlog_is_that_of_what_it_holds(acts: list[str]) -> None:
    backlog, weights = Backlog(), 0
    for step, act in enumerate(acts, 1):
        if act in ("frame", "switch"):
            weights += act == "switch"
            backlog.add_frame(frame_of(step, 3, weights))
        elif act == "message":
            backlog.add_message(b"x" * step)
        elif backlog:
            parts = backlog.take_message()
            if act == "back":
                backlog.put_back(parts)
        assert bool(backlog) == (backlog.size > 0)
    while backlog:
        backlog.take_message()
    assert backlog.size == 0


# -- any order of things


@settings(max_examples=150)
@given(st.integers(0, 1 << 32))
def test_every_token_arrives_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    outbox = Room()
    publisher = Publisher(outbox)
    names = [b"0", b"1", b"2"]
    for server, name in enumerate(names):
        publisher.attach(server, name)
        outbox.room[name] = 0
    output: dict[tuple[int, int], list[int]] = {
        (server, stream): [] for server in range(3) for stream in range(rng.randint(1, 5))
    }
    running = list(output)
    ends: dict[tuple[int, int], int] = {}
    for _ in range(rng.randint(1, 80)):
        keys = [key for key in running if rng.random() < 0.8]
        new = {key: [rng.randrange(1000) for _ in range(rng.choice([1, 1, 3]))] for key in keys}
        finish = [rng.choice([0] * 30 + [FinishReason.EOS]) for _ in keys]
        failed = []
        for key, end in zip(keys, finish, strict=True):
            if end or rng.random() < 0.03:
                running.remove(key)
                ends[key] = int(end)
                if not end:
                    generated = len(output[key]) + len(new[key])
                    failed.append(StreamFailure(*key, generated, "engine_error", "x"))
        rows = StepRows(
            i32(*[key[0] for key in keys]),
            i32(*[key[1] for key in keys]),
            i32(*[len(output[key]) for key in keys]),
            i32(*[token for key in keys for token in new[key]]),
            i32(*[len(new[key]) for key in keys]),
            np.array(finish, np.int8),
            failed=failed,
        )
        for key in keys:
            output[key] += new[key]
        publisher.publish(rows, Load())
        for name in names:
            outbox.room[name] = rng.choice([0, 0, 0, 1, 2, 50])
        if rng.random() < 0.5:
            publisher.flush()
    for name in names:
        outbox.room[name] = 1 << 30
    publisher.flush()
    for server, name in enumerate(names):
        received = outbox.received(name)
        for (owner, stream), tokens in output.items():
            if owner == server:
                assert received.tokens.get(stream, []) == tokens
                assert received.finish.get(stream, 0) == ends.get((owner, stream), 0)
                assert (stream in received.failed) == (ends.get((owner, stream)) == 0)


# -- what it costs


def frame_of(step: int, rows: int, weights: int = 0) -> TokenFrame:
    return TokenFrame(
        step=step,
        stream=np.arange(rows, dtype=np.int32),
        position=np.full(rows, step, np.int32),
        tokens=i32(*[step] * rows),
        weights=weights,
    )


def test_segments_take_about_one_int_per_token() -> None:
    segments, steps, rows = FrameBacklog(), 5000, 64
    for step in range(steps):
        segments.append(frame_of(step, rows))
    size = count = 0
    while segments:
        frame = segments.popleft()
        count += 1
        size += sum(column.nbytes for column in (frame.stream, frame.position, frame.counts(), frame.tokens))
    assert size < 1.25 * 4 * steps * rows
    assert count <= steps / SEGMENT_TOKENS_PER_ROW + 8


def test_segments_merge_a_token_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.engine.loop import backlog as module

    merged = []
    merge = module.merge_frames

    def counting(frames: list[TokenFrame]) -> TokenFrame:
        merged.append(sum(len(frame.tokens) for frame in frames))
        return merge(frames)

    monkeypatch.setattr(module, "merge_frames", counting)
    segments, steps, rows = FrameBacklog(), 5000, 8
    for step in range(steps):
        segments.append(frame_of(step, rows))
    assert sum(merged) < 10 * steps * rows
    assert max(merged) <= 2 * SEGMENT_TOKENS_PER_ROW * rows


class Sink:
    def send(self, identity: bytes, parts: list[bytes]) -> bool:
        return True


@pytest.mark.parametrize(("servers", "interval"), [(1, 1), (2, 1), (1, 10)])
def test_steady_steps_leave_nothing_to_collect(model_dir: Path, servers: int, interval: int) -> None:
    """1,024 rows a step: reference counting frees what a step makes, so no collection is triggered."""
    config = ServeConfig(engine="synthetic", synthetic_step_ms=0, max_model_len=4096)
    engine = SyntheticEngine(config, str(model_dir))
    publisher = Publisher(Sink())
    for server in range(servers):
        publisher.attach(server, b"%d" % server)
    for stream in range(1024):
        engine.submit(stream % servers, submit(stream, 4000, interval=interval))
    for _ in range(10):
        publisher.publish(engine.step(), engine.load())
    assert gc.isenabled()
    gc.collect()
    objects = len(gc.get_objects())
    collections = [generation["collections"] for generation in gc.get_stats()]
    for _ in range(1000):
        publisher.publish(engine.step(), engine.load())
    assert [generation["collections"] for generation in gc.get_stats()] == collections
    assert abs(len(gc.get_objects()) - objects) < 100
    assert engine.load().running == 1024


def test_failed_is_what_the_wire_says(publisher: Publisher, outbox: Room) -> None:
    publisher.publish(no_rows(StreamFailure(0, 3, 9, "overloaded", "m")), Load())
    assert [parts[0] for parts in outbox.sent[b"zero"]] == [
        bytes.fromhex("96120309aa6f7665726c6f61646564a16dcd03e8")
    ]


def test_streams_refused_for_load_are_told_when_there_is_room(outbox: Room) -> None:
    now = 5.0
    publisher = Publisher(outbox, clock=lambda: now)
    publisher.attach(0, b"zero")
    for stream in (10, 20, 30, 40):
        streams, ends = (
            [stream, stream + 1, stream + 2],
            [FinishReason.NONE, FinishReason.EOS, FinishReason.LENGTH],
        )
        publisher.publish(step_rows([0] * 3, streams, [0] * 3, [9] * 3, ends), Load())
        now += 1
    publisher.publish(no_rows(StreamFailure(0, 4, 0, "overloaded", "m")), Load(waiting=19))
    publisher.publish(no_rows(StreamFailure(0, 5, 0, "engine_error", "m")), Load(waiting=19))
    failed = outbox.received(b"zero").failed
    assert failed[4].retry_after_ms == 12_500  # for 20 streams, when 8 ended in 5 seconds
    assert failed[5].retry_after_ms == 0
