"""Replies as columns have what the API's own replies have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.dialects.completions.reply import CompletionReply
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.columns import NOTHING, ColumnsReply, plan_columns
from penstock.http.errors import ApiError
from penstock.streaming.stream import StreamError
from penstock.wire.frames import FinishReason
from penstock.wire.messages import SamplingParams
from tests.generation.planning import tiny_tokenizer
from tests.generation.replying import Desk, MemorySink, in_loop, tables_of

Columns = dict[str, NDArray[Any]]
_TYPES = {"I64": np.int64, "I32": np.int32, "F32": np.float32}
TEXT = "def main(): pass # a comment of some length"


def read(body: bytes) -> tuple[Columns, dict[str, Any]]:
    start = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:start])
    facts = {name: json.loads(text) for name, text in header.pop("__metadata__", {}).items()}
    found = {}
    for name, tensor in header.items():
        first, end = tensor["data_offsets"]
        values = np.frombuffer(body[start + first : start + end], _TYPES[tensor["dtype"]])
        found[name] = values.reshape(tensor["shape"])
    return found, facts


def frames(data: bytes) -> Iterator[tuple[Columns, dict[str, Any]]]:
    """The frames of a stream that has ended, or not."""
    while data:
        size = int.from_bytes(data[:8], "little")
        if not size:
            assert data == bytes(8), "bytes after the end"
            return
        assert len(data) >= 8 + size, "a frame is cut"
        yield read(data[8 : 8 + size])
        data = data[8 + size :]


def tokens() -> list[int]:
    return list(tiny_tokenizer().encode(TEXT, False))


def plan_of(**options: Any) -> RequestPlan:
    logprobs = options.setdefault("logprobs", 1)
    return RequestPlan(
        model="m",
        prompts=["p"],
        add_special_tokens=False,
        base=SamplingParams(max_tokens=100, seed=0, logprobs=logprobs),
        max_model_len=1000,
        **options,
    )


def columns_of(plan: RequestPlan) -> ColumnsReply:
    plan_columns(plan)
    return ColumnsReply(CompletionReply("r", "m", "assistant"), plan)


def desk() -> Desk:
    return Desk(tables_of(tiny_tokenizer().raw))


def deliver(own: Desk, handle: int, ids: list[int], *, row: int, finish: FinishReason, merged: int) -> None:
    parts = [ids[start : start + row] for start in range(0, len(ids), row)]
    own.deliver(own.rows(handle, parts, finish, logprobs=True), merged=merged)


@pytest.mark.parametrize("merged", [1, 4])
@pytest.mark.parametrize("row", [1, 5, 1000])
def test_a_whole_reply_has_the_rows_of_all_choices(row: int, merged: int) -> None:
    def run() -> None:
        own, plan = desk(), plan_of(n=2)
        reply = own.collected(plan, format=columns_of(plan))
        ids = tokens()
        deliver(own, 0, ids, row=row, finish=FinishReason.LENGTH, merged=merged)
        assert not reply.done.done()
        deliver(own, 1, ids[:3], row=row, finish=FinishReason.STOP_TOKEN, merged=merged)
        found, facts = read(b"".join(reply.format.whole(reply)))
        assert found["offsets"].tolist() == [0, len(ids), len(ids) + 3]
        assert found["token_ids"].tolist() == [*ids, *ids[:3]]
        expected = np.array([-token / 7 for token in [*ids, *ids[:3]]], np.float32)
        np.testing.assert_array_equal(found["logprobs"], expected)
        assert found["top_ids"].tolist() == [[0]] * (len(ids) + 3)
        assert found["top_logprobs"].tolist() == [[-1.5]] * (len(ids) + 3)
        assert facts["choices"] == [
            {"index": 0, "finish_reason": "length", "stop_reason": None},
            {"index": 1, "finish_reason": "stop", "stop_reason": ids[2]},
        ]
        assert facts["usage"]["completion_tokens"] == len(ids) + 3
        assert facts["id"] == "r"
        assert "prompt_token_ids" not in found

    in_loop(run)


def test_without_logprobs_there_are_ids_alone() -> None:
    def run() -> None:
        own, plan = desk(), plan_of(logprobs=-1, return_token_ids=True)
        reply = own.collected(plan, format=columns_of(plan))
        own.deliver(own.rows(0, [tokens()], FinishReason.EOS))
        found, _ = read(b"".join(reply.format.whole(reply)))
        assert found.keys() == {"offsets", "token_ids", "prompt_offsets", "prompt_token_ids"}
        assert found["prompt_token_ids"].tolist() == [1, 2]
        assert found["prompt_offsets"].tolist() == [0, 2]

    in_loop(run)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_ids_where_it_ends_the_text(stream: bool) -> None:
    def run() -> None:
        plain = desk()
        wanted = plain.collected(plan_of(stop=("pass",), return_token_ids=True))
        deliver(plain, 0, tokens(), row=3, finish=FinishReason.LENGTH, merged=1)
        choice = json.loads(b"".join(wanted.format.whole(wanted)))["choices"][0]
        own, plan = desk(), plan_of(stop=("pass",), stream=stream)
        if stream:
            _, sink = own.streamed(plan, format=columns_of(plan))
        else:
            reply = own.collected(plan, format=columns_of(plan))
        deliver(own, 0, tokens(), row=3, finish=FinishReason.LENGTH, merged=1)
        parts = list(frames(sink.data)) if stream else [read(b"".join(reply.format.whole(reply)))]
        ids = [token for found, _ in parts for token in found.get("token_ids", ())]
        values = [value for found, _ in parts for value in found.get("logprobs", ())]
        assert ids == choice["token_ids"]
        assert len(values) == len(ids) < len(tokens())
        [ended] = [each for _, facts in parts for each in facts.get("choices", ())]
        assert ended == {"index": 0, "finish_reason": "stop", "stop_reason": "pass"}

    in_loop(run)


def joined(sink: MemorySink, choices: int) -> list[list[int]]:
    """The ids of each choice of a stream that has ended well."""
    assert sink.ended == "finish"
    found: list[list[int]] = [[] for _ in range(choices)]
    for columns, _ in frames(sink.data):
        for place, index in enumerate(columns.get("choices", ())):
            rows = slice(*columns["offsets"][place : place + 2])
            found[index] += columns["token_ids"][rows].tolist()
    return found


@pytest.mark.parametrize("row", [1, 7])
def test_a_streams_frames_have_the_rows_since_the_frame_before(row: int) -> None:
    def run() -> None:
        own, plan = desk(), plan_of(n=2, stream=True, return_token_ids=True)
        _, sink = own.streamed(plan, format=columns_of(plan))
        ids = tokens()
        deliver(own, 1, ids[::-1], row=row, finish=FinishReason.LENGTH, merged=1)
        assert not sink.ended
        deliver(own, 0, ids, row=row, finish=FinishReason.LENGTH, merged=1)
        assert joined(sink, 2) == [ids, ids[::-1]]
        every = list(frames(sink.data))
        assert [facts["id"] for _, facts in every if "id" in facts] == ["r"]
        prompts = [
            columns["prompt_token_ids"].tolist() for columns, _ in every if "prompt_token_ids" in columns
        ]
        assert prompts == [[1, 2]], "once, for both choices"
        for columns, _ in every[:-1]:
            assert len(columns["logprobs"]) == len(columns["top_ids"]) == len(columns["token_ids"]) > 0
        assert every[-1][0] == {}
        assert every[-1][1]["usage"]["completion_tokens"] == 2 * len(ids)
        assert sink.data.endswith(bytes(8))

    in_loop(run)


def test_a_client_that_does_not_read_gets_all_rows_at_once_later() -> None:
    def run() -> None:
        own, plan = desk(), plan_of(stream=True)
        reply, sink = own.streamed(plan, format=columns_of(plan))
        ids = tokens()
        own.deliver(own.rows(0, [ids[:1]], logprobs=True))
        reply.on_pause()
        own.deliver(own.rows(0, [[token] for token in ids[1:9]], logprobs=True))
        assert len(list(frames(sink.data))) == 1
        reply.on_resume()
        assert [len(columns["token_ids"]) for columns, _ in frames(sink.data)] == [1, 8]
        own.deliver(own.rows(0, [ids[9:]], FinishReason.LENGTH, logprobs=True))
        assert joined(sink, 1) == [ids]

    in_loop(run)


def test_a_slow_client_is_cut_at_its_backlog() -> None:
    def run() -> None:
        own, plan = Desk(tables_of(tiny_tokenizer().raw), max_backlog=500), plan_of(stream=True)
        reply, sink = own.streamed(plan, format=columns_of(plan))
        own.deliver(own.rows(0, [tokens()[:1]], logprobs=True))
        reply.on_pause()
        own.deliver(own.rows(0, [tokens()], logprobs=True))
        assert sink.ended == "cut"

    in_loop(run)


def test_a_keep_alive_is_a_frame_without_rows() -> None:
    def run() -> None:
        own, plan = desk(), plan_of(stream=True)
        reply, sink = own.streamed(plan, format=columns_of(plan))
        reply.send_keep_alive(1.0, 2.0)
        assert sink.data == NOTHING
        deliver(own, 0, tokens(), row=4, finish=FinishReason.LENGTH, merged=1)
        assert joined(sink, 1) == [tokens()]

    in_loop(run)


def test_a_failure_is_a_frame_with_the_error() -> None:
    def run() -> None:
        own, plan = desk(), plan_of(stream=True)
        _, sink = own.streamed(plan, format=columns_of(plan))
        own.deliver(own.rows(0, [tokens()[:5]], logprobs=True))
        own.streams.fail(0, 0, StreamError(503, "engine_died", "The engine is gone."))
        assert joined(sink, 1) == [tokens()[:5]]
        _, facts = list(frames(sink.data))[-1]
        assert facts["error"]["code"] == "engine_died"
        assert own.outcomes == ["error"]

    in_loop(run)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_that_the_engine_left_out_are_an_error(stream: bool) -> None:
    own_plan = plan_of(stream=stream)

    def leave_out() -> None:
        own = desk()
        format = columns_of(own_plan)
        reply: CollectedReply | None = None
        if stream:
            _, sink = own.streamed(own_plan, format=format)
        else:
            reply = own.collected(own_plan, format=format)
        [frame] = own.rows(0, [tokens()], FinishReason.LENGTH, logprobs=True)
        assert frame.logprobs is not None
        frame.logprobs = frame.logprobs.select_tokens(np.arange(len(tokens())) != 2)
        own.deliver([frame])
        if reply is None:
            error = sink.over.result()
            assert error is not None
            assert (error.status, sink.data) == (500, b"")
        else:
            with pytest.raises(ApiError, match="logprobs of"):
                list(reply.format.whole(reply))

    in_loop(leave_out)


def test_a_stream_cannot_echo_with_logprobs() -> None:
    with pytest.raises(ApiError, match="echo"):
        plan_columns(plan_of(stream=True, echo=True))
