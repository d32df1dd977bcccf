"""Replies of SGLang's ``/generate``: rows in, bytes out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from penstock.config.serve import ServeConfig
from penstock.dialects.sglang.dialect import SglangGenerate
from penstock.wire.frames import FinishReason, TokenFrame
from penstock.wire.logprobs import PromptLogprobs
from tests.dialects.sglang.test_dialect import sglang_body
from tests.generation.planning import tiny_input_processor, tiny_tokenizer
from tests.generation.replying import Desk, MemorySink, in_loop, tables_of

DIALECT = SglangGenerate(ServeConfig(), tiny_input_processor())
TOKENS = tiny_tokenizer().encode("def main(): return 'ééé'", False)


def streamed(sampling: dict[str, Any] | None = None, **fields: Any) -> tuple[Desk, MemorySink]:
    desk = Desk(tables_of(tiny_tokenizer().raw))
    plan = DIALECT.plan(sglang_body(sampling, stream=True, **fields))
    _, sink = desk.streamed(plan, format=DIALECT.reply_format(plan, "r"))
    return desk, sink


def collected(
    rows: list[list[int]],
    finish: FinishReason,
    sampling: dict[str, Any] | None = None,
    *,
    logprobs: bool = False,
    first: list[TokenFrame] | None = None,
    **fields: Any,
) -> Any:
    desk = Desk(tables_of(tiny_tokenizer().raw))
    plan = DIALECT.plan(sglang_body(sampling, **fields))
    reply = desk.collected(plan, format=DIALECT.reply_format(plan, "r"))
    desk.deliver(first or [])
    for index in range(plan.n):
        desk.deliver(desk.rows(index, rows, finish, logprobs=logprobs))
    return json.loads(b"".join(reply.format.whole(reply)))


def test_events_repeat_what_was_sent() -> None:
    def run() -> None:
        desk, sink = streamed()
        desk.deliver(desk.rows(0, [[token] for token in TOKENS], FinishReason.LENGTH))
        events = sink.events()
        assert [event["output_ids"] for event in events] == [TOKENS[: i + 1] for i in range(len(TOKENS))]
        whole = tiny_tokenizer().decode(TOKENS)
        assert all(whole.startswith(event["text"]) for event in events)
        assert events[-1]["text"] == whole
        assert [event["meta_info"]["completion_tokens"] for event in events] == [*range(1, len(TOKENS) + 1)]
        assert events[0]["meta_info"]["finish_reason"] is None
        last = events[-1]["meta_info"]
        assert last["finish_reason"] == {"type": "length", "length": len(TOKENS)}
        assert (last["id"], last["prompt_tokens"], last["cached_tokens"]) == ("r", 2, 0)
        assert last["e2e_latency"] >= 0
        assert "e2e_latency" not in events[0]["meta_info"]
        assert "index" not in events[0]
        assert sink.lines()[-1] == "data: [DONE]"

    in_loop(run)


def test_events_have_what_is_new_if_asked_to() -> None:
    def run() -> None:
        options = {"incremental_streaming_output": True, "return_logprob": True, "top_logprobs_num": 1}
        desk, sink = streamed(rid="mine", **options)
        desk.deliver(desk.rows(0, [[token] for token in TOKENS], FinishReason.LENGTH, logprobs=True))
        events = sink.events()
        assert [event["output_ids"] for event in events] == [[token] for token in TOKENS]
        assert "".join(event["text"] for event in events) == tiny_tokenizer().decode(TOKENS)
        own = [event["meta_info"]["output_token_logprobs"] for event in events]
        assert [part[0][1] for part in own] == TOKENS
        assert all(event["meta_info"]["id"] == "mine" for event in events)
        tops = [event["meta_info"]["output_top_logprobs"] for event in events]
        assert tops == [[[[-1.5, 0, None]]]] * len(TOKENS)

    in_loop(run)


def test_repeated_logprobs_are_those_of_the_whole_reply() -> None:
    def run() -> None:
        options = {"return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": True}
        desk, sink = streamed(**options)
        desk.deliver(desk.rows(0, [[token] for token in TOKENS], FinishReason.LENGTH, logprobs=True))
        whole = collected([TOKENS], FinishReason.LENGTH, logprobs=True, **options)
        last = sink.events()[-1]
        for body in (last, whole):
            assert body["meta_info"].pop("e2e_latency") >= 0
        assert last == whole
        meta = whole["meta_info"]
        assert meta["output_token_logprobs_length"] == len(meta["output_token_logprobs"]) == len(TOKENS)
        assert meta["output_token_logprobs"][0] == [
            float(str(np.float32(-TOKENS[0] / 7))),
            TOKENS[0],
            tiny_tokenizer().decode(TOKENS[:1]),
        ]
        assert (meta["input_token_logprobs"], meta["input_top_logprobs"]) == ([], [])

    in_loop(run)


def test_ends_say_what_matched() -> None:
    def run() -> None:
        for finish, sampling, rows, matched in (
            (FinishReason.EOS, {}, [[*TOKENS[:2], 1]], 1),
            (FinishReason.STOP_TOKEN, {"stop_token_ids": [9]}, [[*TOKENS[:2], 9]], 9),
            (FinishReason.NONE, {"stop": "main"}, [TOKENS], "main"),
            (FinishReason.GRAMMAR, {"regex": "d"}, [TOKENS[:1]], None),
        ):
            body = collected(rows, finish, sampling)
            assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
            assert body["output_ids"] == rows[0][: len(body["output_ids"])]
        body = collected([TOKENS[:2]], FinishReason.ABORT)
        assert body["meta_info"]["finish_reason"]["type"] == "abort"
        assert body["output_ids"] == TOKENS[:2]

    in_loop(run)


def test_several_outputs_are_a_list() -> None:
    def run() -> None:
        bodies = collected([TOKENS[:2]], FinishReason.LENGTH, {"n": 2}, return_prompt_token_ids=True)
        assert [body["index"] for body in bodies] == [0, 1]
        assert [body["meta_info"]["id"] for body in bodies] == ["r_0", "r_1"]
        assert all(body["prompt_token_ids"] == [1, 2] for body in bodies)
        assert isinstance(collected([TOKENS[:2]], FinishReason.LENGTH, input_ids=[[1, 2]]), list)

    in_loop(run)


def test_logprobs_of_the_prompt_begin_at_their_place() -> None:
    def run() -> None:
        scores = PromptLogprobs(
            row=np.zeros(1, np.int32),
            position=np.array([1], np.int32),
            ids=np.array([[2, 8]], np.int32),
            values=np.array([[-0.5, -0.25]], np.float32),
            rank=np.array([2], np.int32),
        )
        frame = TokenFrame(
            step=0,
            stream=np.array([0], np.int32),
            position=np.array([0], np.int32),
            tokens=np.empty(0, np.int32),
            count=np.array([0], np.int32),
            prompt=scores,
        )
        options: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 1, "logprobs": True}
        meta = collected([TOKENS[:1]], FinishReason.LENGTH, first=[frame], logprob_start_len=0, **options)[
            "meta_info"
        ]
        assert meta["input_token_logprobs"] == [[None, 1, None], [-0.5, 2, None]]
        assert meta["input_top_logprobs"] == [None, [[-0.25, 8, None]]]
        meta = collected([TOKENS[:1]], FinishReason.LENGTH, first=[frame], logprob_start_len=1, **options)[
            "meta_info"
        ]
        assert meta["input_token_logprobs"] == [[None, 2, None]]
        assert meta["input_top_logprobs"] == [None]
        meta = collected([TOKENS[:1]], FinishReason.LENGTH, first=[frame], logprob_start_len=2, **options)[
            "meta_info"
        ]
        assert (meta["input_token_logprobs"], meta["input_top_logprobs"]) == ([], [])

    in_loop(run)


def test_prompts_and_choices_are_known_by_their_ids() -> None:
    plan = DIALECT.plan(sglang_body(input_ids=[[1], [2]], rid=["a", "b"]))
    format = DIALECT.reply_format(plan, "r")
    assert [format.choice_ids(index) for index in range(2)] == [("a",), ("b",)]
    plan = DIALECT.plan(sglang_body({"n": 2}, rid="a"))
    format = DIALECT.reply_format(plan, "r")
    assert (format.id, format.choice_ids(1)) == ("a", ("a_1",))
