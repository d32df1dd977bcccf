"""Streams of inputs at an attached engine whose connection replays outputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.config.serve import ServeConfig
from penstock.engine.attach.attached_core import AttachedCore
from penstock.engine.attach.attached_process import AttachedProcess
from penstock.engine.attach.connection import EngineConnection
from penstock.engine.attach.engine import AttachedEngine, ModelFacts
from penstock.engine.attach.pooling import streams as pooled_streams
from penstock.engine.attach.pooling.abilities import TRIED_TOKENS, find_abilities
from penstock.engine.attach.request_ids import RequestIds
from penstock.engine.base import Hold, RequestRejected, StepRows
from penstock.supervisor.startup.model_resolution import DEMO_DIR
from penstock.wire.arrays import F32
from penstock.wire.frames import FinishReason
from penstock.wire.messages import SamplingParams, Submit
from penstock.wire.pooling import PoolingInfo, PoolingParams, PoolingTask
from penstock.wire.vllm.messages import EngineLost, ReadyResponse
from tests.engine.attach.test_arrays import inline
from tests.engine.attach.test_engine import FakeConnection

SLOTS, WIDTH = 4, 3
STOP, ABORT, ERROR = 0, 2, 3
EVERYTHING = PoolingInfo(tuple(PoolingTask), WIDTH, 2)


class Pooled:
    """The engine, its connection, and what API server 0's streams got."""

    def __init__(self, run_dir: Path, info: PoolingInfo = EVERYTHING, **options: Any) -> None:
        self.connection = FakeConnection()
        ready = ReadyResponse(max_model_len=128, vllm_version="0.32.0", max_num_seqs=SLOTS)
        connection: EngineConnection = self.connection  # type: ignore[assignment]
        self.core = AttachedCore(connection, ready, RequestIds(SLOTS), 60)
        self.engine = AttachedEngine(
            ServeConfig(model=str(DEMO_DIR), attach="127.0.0.1:0", **options),
            ModelFacts(str(DEMO_DIR)),
            AttachedProcess(connection, ready, self.core, info),
            run_dir=str(run_dir),
            rank=0,
        )
        self.values: dict[int, list[F32]] = {}
        self.next: dict[int, int] = {}
        self.ends: dict[int, FinishReason | str] = {}
        self.pending: dict[str, int] = {}
        """First tokens by id of requests without a result."""
        self._read = 0

    def submit(
        self,
        stream: int,
        lengths: list[int],
        *,
        task: PoolingTask = PoolingTask.EMBED,
        resumed: int = 0,
        priority: int = 0,
        server: int = 0,
        **params: Any,
    ) -> None:
        """Inputs of these lengths; the first token of each is its index in the stream."""
        prompt = np.full(sum(lengths), 40, "<i4")
        prompt[np.cumsum([0, *lengths[:-1]])] = np.arange(len(lengths)) + resumed
        pooling = PoolingParams(task, np.array(lengths, "<i4").tobytes(), **params)
        sampling = SamplingParams(max_tokens=resumed + len(lengths), seed=1)
        self.next.setdefault(stream, resumed)
        self.engine.submit(
            server,
            Submit(stream, prompt.tobytes(), sampling, resumed=resumed, priority=priority, pooling=pooling),
        )

    def requests(self) -> list[tuple[str, int]]:
        """Id and first token of the requests that vLLM has been given since the last call."""
        self.steps()
        self.core.flush()
        added = [msgspec.msgpack.decode(each[1]) for each in self.connection.sent if each[0] == b"\x00"]
        new, self._read = added[self._read :], len(added)
        found = [(request[0], request[1][0]) for request in new]
        self.pending |= found
        return found

    def answer(self, *results: tuple[str, Any], finish: int = STOP, error: Any = None) -> None:
        """Results by id: vectors, or None."""
        records = []
        for name, vector in results:
            self.pending.pop(name)
            record: list[Any] = [name, [], *[None] * 11, 0, *[None] * 5]
            record[4] = None if vector is None else inline(vector, "<f4")
            record[5], record[18] = finish, error
            records.append(record)
        self.connection.put(records)
        self.steps()

    def steps(self) -> None:
        while self.engine.can_step():
            self._take(self.engine.step())

    def _take(self, rows: StepRows) -> None:
        value = vector = 0
        for row, stream in enumerate(rows.stream.tolist()):
            count = 1 if rows.count is None else int(rows.count[row])
            assert rows.position[row] == self.next[stream]
            self.next[stream] += count
            assert rows.vectors is not None or not count
            for tokens in rows.tokens[vector : vector + count].tolist():
                assert rows.vectors is not None
                size = tokens * int(rows.vectors.width[row])
                self.values.setdefault(stream, []).append(rows.vectors.values[value : value + size])
                value += size
            vector += count
            if rows.finish is not None and rows.finish[row]:
                assert stream not in self.ends
                self.ends[stream] = FinishReason(rows.finish[row])
        for failure in rows.failed:
            assert failure.stream not in self.ends
            assert failure.position == self.next[failure.stream]
            self.ends[failure.stream] = f"{failure.code}: {failure.message}"

    def aborted(self) -> list[str]:
        self.core.flush()
        found = [msgspec.msgpack.decode(each[1]) for each in self.connection.sent if each[0] == b"\x01"]
        return [name for names in found for name in names]


def vector(number: float) -> list[float]:
    return [number] * WIDTH


def finish(pooled: Pooled) -> list[int]:
    """Answer everything, each with its first token as the vector. Returns these tokens in the order in which
    vLLM was given them."""
    order: list[int] = []
    while pooled.requests() or pooled.pending:
        (name, token), *_ = pooled.pending.items()
        pooled.answer((name, vector(token)))
        order.append(token)
    return order


@pytest.fixture
def pooled(tmp_path: Path) -> Pooled:
    return Pooled(tmp_path)


def test_results_leave_in_the_order_of_inputs(pooled: Pooled) -> None:
    pooled.submit(0, [5, 1, 2, 3, 4, 9])
    first = pooled.requests()
    assert [token for _, token in first] == [0, 1, 2, 3]
    pooled.answer((first[2][0], vector(2)), (first[1][0], vector(1)))
    assert pooled.values == {}
    second = pooled.requests()
    assert [token for _, token in second] == [4, 5]
    pooled.answer((first[0][0], vector(0)))
    assert [each[0] for each in pooled.values[0]] == [0, 1, 2]
    pooled.answer(*((name, vector(token)) for name, token in second))
    assert pooled.ends == {}
    pooled.answer((first[3][0], vector(3)))
    assert np.array_equal(pooled.values[0], [vector(number) for number in range(6)])
    assert pooled.ends == {0: FinishReason.EOS}
    assert not pooled.engine.has_work()
    assert pooled.engine.load().running == 0
    assert pooled.engine.take_admitted() == [(0, 0)]


def test_newcomers_and_a_long_list_take_turns(pooled: Pooled) -> None:
    pooled.submit(0, [1] * 40)
    first = pooled.requests()
    for stream in range(1, 6):
        pooled.submit(stream, [1])
    for name, _ in first:
        pooled.answer((name, vector(0)))
    assert len(pooled.engine.take_admitted()) == 1 + 2
    finish(pooled)
    assert list(pooled.ends) == [1, 2, 3, 4, 5, 0]


def test_the_most_important_stream_is_next(tmp_path: Path) -> None:
    pooled = Pooled(tmp_path, scheduling_policy="priority")
    pooled.submit(0, [1] * 8, priority=5)
    first = pooled.requests()
    pooled.submit(1, [1] * 5, priority=-1)
    pooled.submit(2, [1], priority=9)
    pooled.answer(*((name, vector(0)) for name, _ in first))
    finish(pooled)
    assert list(pooled.ends) == [1, 0, 2]


def test_vectors_of_tokens_and_numbers_of_labels(pooled: Pooled) -> None:
    pooled.submit(0, [2, 1], task=PoolingTask.TOKEN_EMBED)
    ((one, _), (two, _)) = pooled.requests()
    pooled.answer((one, [vector(1), vector(2)]), (two, [vector(3)]))
    assert [each.tolist() for each in pooled.values[0]] == [[*vector(1), *vector(2)], vector(3)]
    pooled.submit(1, [4], task=PoolingTask.CLASSIFY)
    pooled.submit(2, [4], dimensions=2)
    ((one, _), (two, _)) = pooled.requests()
    pooled.answer((one, [0.25, 0.75]), (two, [0.6, 0.8]))
    assert pooled.values[1][0].tolist() == [0.25, 0.75]
    assert pooled.values[2][0].tolist() == pytest.approx([0.6, 0.8])


def test_pairs_tell_vllm_their_second_text(pooled: Pooled) -> None:
    pooled.submit(0, [5, 7], task=PoolingTask.CLASSIFY, seconds=np.array([3, 4], "<i4").tobytes())
    pooled.requests()
    sent = [msgspec.msgpack.decode(each[1])[4] for each in pooled.connection.sent if each[0] == b"\x00"]
    assert [params[8] for params in sent] == [{"compressed_token_type_ids": second} for second in (3, 4)]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([1.0, 2.0], r"engine_error: .*2 values of the shape \[2\], not 3"),
        (None, "engine_error: vLLM's vector cannot be read: NoneType"),
    ],
)
def test_an_input_without_its_vector_ends_its_stream_alone(pooled: Pooled, answer: Any, words: str) -> None:
    pooled.submit(0, [1, 1, 1])
    pooled.submit(1, [1])
    requests = pooled.requests()
    pooled.answer((requests[0][0], vector(7)))
    ours = [name for name, token in requests[1:] if token]
    pooled.answer((ours[0], answer))
    assert re.fullmatch(f"{words}.*", str(pooled.ends[0]))
    assert pooled.aborted() == ours[1:]
    assert len(pooled.values[0]) == 1
    (other,) = (name for name, token in requests[1:] if not token)
    pooled.answer((other, vector(1)))
    assert pooled.ends[1] is FinishReason.EOS
    assert not pooled.engine.has_work()


def test_errors_of_vllms(pooled: Pooled) -> None:
    pooled.submit(0, [1])
    ((name, _),) = pooled.requests()
    error = {"code": "x", "message": "paused", "retryable": True}
    pooled.answer((name, None), finish=ERROR, error=error)
    assert pooled.ends[0] == "unavailable: vLLM cannot run this request now: paused"
    pooled.submit(1, [1])
    ((name, _),) = pooled.requests()
    with pytest.raises(EngineLost):
        pooled.answer((name, None), finish=ABORT)


def test_abort_and_lost_servers(pooled: Pooled) -> None:
    pooled.submit(0, [1] * 6)
    first = pooled.requests()
    pooled.submit(1, [1] * 6, server=1)
    pooled.submit(2, [1])
    pooled.answer((first[0][0], vector(0)))
    second = pooled.requests()
    assert len(second) == 1
    pooled.engine.abort(0, [0, 2, 77])
    pooled.steps()
    assert pooled.ends == {0: FinishReason.ABORT, 2: FinishReason.ABORT}
    assert set(pooled.aborted()) >= {name for name, _ in first[1:]}
    others = pooled.requests()
    pooled.engine.drop_server(1)
    assert not pooled.engine.has_work()
    assert {name for name, _ in (*first[1:], *second, *others)} == set(pooled.aborted())
    pooled.submit(3, [1] * 9)
    finish(pooled)
    assert pooled.ends[3] is FinishReason.EOS


def test_fail_all_and_what_comes_after(pooled: Pooled) -> None:
    pooled.submit(0, [1] * 6)
    pooled.submit(1, [1] * 6)
    first = pooled.requests()
    pooled.answer((first[0][0], vector(0)))
    pooled._take(pooled.engine.fail_all("engine_error", "gone"))
    assert pooled.ends == {0: "engine_error: gone", 1: "engine_error: gone"}
    pooled.ends.clear()
    assert not pooled.engine.has_work()
    pooled.submit(2, [1] * 6)
    finish(pooled)
    assert pooled.ends == {2: FinishReason.EOS}


def test_a_resumed_stream_has_the_rest_of_its_inputs(pooled: Pooled) -> None:
    pooled.submit(0, [1, 2, 3], resumed=7)
    assert finish(pooled) == [7, 8, 9]
    assert [each[0] for each in pooled.values[0]] == [7, 8, 9]
    assert pooled.next[0] == 10


def test_hold(pooled: Pooled) -> None:
    pooled.submit(0, [1] * 6)
    first = pooled.requests()
    pooled.engine.hold(Hold.NEWCOMERS)
    pooled.submit(1, [1])
    pooled.answer(*((name, vector(token)) for name, token in first))
    assert len(pooled.requests()) == 2
    pooled.engine.hold(Hold.ALL)
    assert pooled.requests() == []
    assert pooled.engine.has_work()
    assert not pooled.engine.can_step()
    pooled.engine.hold(Hold.NOTHING)
    assert len(pooled.requests()) == 1


def test_results_to_come_are_bounded(pooled: Pooled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooled_streams, "MAX_VALUES", 10 * WIDTH)
    pooled.submit(0, [6, 4, 1, 30], task=PoolingTask.TOKEN_EMBED)
    first = pooled.requests()
    assert len(first) == 2
    pooled.answer((first[1][0], [vector(1)] * 4))
    assert pooled.requests() == []  # the second result waits for the first one
    pooled.answer((first[0][0], [vector(0)] * 6))
    (third,) = pooled.requests()
    pooled.answer((third[0], [vector(2)]))
    (fourth,) = pooled.requests()  # larger than the bound, but alone
    pooled.answer((fourth[0], [vector(3)] * 30))
    assert pooled.ends == {0: FinishReason.EOS}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lengths": [129]}, "^input: one has 129 tokens, the model takes 128"),
        ({"lengths": [1], "dimensions": 4}, "^dimensions: 4, vectors have 3 values"),
        ({"lengths": [1], "task": PoolingTask.CLASSIFY}, "^task: classify, the model has embed$"),
        ({"lengths": [1], "resumed": 1 << 30}, "^input: a token id that is not among the model's "),
    ],
)
def test_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    pooled = Pooled(tmp_path, PoolingInfo((PoolingTask.EMBED,), WIDTH))
    with pytest.raises(RequestRejected, match=words):
        pooled.submit(0, **given)
    assert not pooled.engine.has_work()


def test_text_is_refused(pooled: Pooled) -> None:
    request = Submit(0, bytes(4), SamplingParams(max_tokens=4, seed=1))
    with pytest.raises(RequestRejected, match="no text"):
        pooled.engine.submit(0, request)


def answer_trials(pooled: Pooled, shapes: dict[str, tuple[int, ...]]) -> None:
    """Have vLLM answer each request with values of the shape of its task."""

    def send(frames: Any) -> None:
        FakeConnection.send(pooled.connection, frames)
        if frames[0] != b"\x00":
            return
        request = msgspec.msgpack.decode(frames[1])
        record: list[Any] = [request[0], [], *[None] * 11, 0, *[None] * 5]
        shape = shapes.get(request[4][4])
        record[4] = None if shape is None else inline(np.zeros(shape), "<f4")
        record[5] = STOP if shape else ERROR
        pooled.connection.put([record])

    pooled.connection.send = send  # type: ignore[method-assign]


def test_abilities_are_what_vllm_shows(pooled: Pooled, caplog: pytest.LogCaptureFixture) -> None:
    shapes = {"embed": (384,), "token_embed": (TRIED_TOKENS, 384), "token_classify": (TRIED_TOKENS - 1, 1)}
    answer_trials(pooled, shapes)
    pooled.connection.answers["get_supported_tasks"] = ["embed", "token_embed", "token_classify", "plugin"]
    found = find_abilities(pooled.core, lambda: None)
    assert found == PoolingInfo((PoolingTask.EMBED, PoolingTask.TOKEN_EMBED), 384, 1)
    assert "token_classify is not served: for a text of 3 tokens" in caplog.text


@pytest.mark.parametrize("names", [["generate"], None, [], RuntimeError("this engine has none")])
def test_engines_of_text(pooled: Pooled, names: Any) -> None:
    pooled.connection.answers["get_supported_tasks"] = names
    assert find_abilities(pooled.core, lambda: None) is None
    assert not [frames for frames in pooled.connection.sent if frames[0] == b"\x00"]
