"""Replies of ``/inference/v1/generate``: rows in, bytes out."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np

from penstock.config.serve import ServeConfig
from penstock.dialects.tokens.dialect import TokensInOut
from penstock.dialects.tokens.logprobs import entries_by_id
from penstock.generation.replies.logprobs import LogprobCollector, TokenNames
from penstock.streaming.stream import StreamError
from penstock.streaming.token_table import TokenTable
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import RoutedExperts
from tests.dialects.tokens.test_dialect import tokens_body
from tests.generation.planning import tiny_input_processor, tiny_tokenizer
from tests.generation.replying import Desk, MemorySink, in_loop, tables_of

DIALECT = TokensInOut(ServeConfig(), tiny_input_processor())
TOKENS = tiny_tokenizer().encode("def main(): return 'ééé'", False)


def streamed(sampling: dict[str, Any] | None = None, **fields: Any) -> tuple[Desk, MemorySink]:
    desk = Desk(tables_of(tiny_tokenizer().raw))
    plan = DIALECT.plan(tokens_body(sampling, stream=True, **fields))
    _, sink = desk.streamed(plan, format=DIALECT.reply_format(plan, "r"))
    return desk, sink


def collected(
    rows: list[list[int]],
    finish: FinishReason,
    sampling: dict[str, Any] | None = None,
    *,
    logprobs: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    desk = Desk(tables_of(tiny_tokenizer().raw))
    plan = DIALECT.plan(tokens_body(sampling, **fields))
    reply = desk.collected(plan, format=DIALECT.reply_format(plan, "r"))
    desk.deliver(desk.rows(0, rows, finish, logprobs=logprobs))
    body: dict[str, Any] = json.loads(b"".join(reply.format.whole(reply)))
    return body


def ids_of(sink: MemorySink) -> list[int]:
    return [id for event in sink.events() for choice in event["choices"] for id in choice["token_ids"]]


def test_every_row_is_an_event_even_without_text() -> None:
    def run() -> None:
        desk, sink = streamed()
        desk.deliver(desk.rows(0, [[token] for token in TOKENS], FinishReason.LENGTH))
        events = sink.events()
        assert len(events) == len(TOKENS)
        assert ids_of(sink) == TOKENS
        first, last = events[0], events[-1]
        assert first == {
            "request_id": "generate-tokens-r",
            "output_mode": "tokens",
            "choices": [{"index": 0, "token_ids": TOKENS[:1], "logprobs": None, "finish_reason": None}],
        }
        assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("length", None)
        assert sink.lines()[-1] == "data: [DONE]"

    in_loop(run)


def test_usage_and_prompt_ids_are_sent_if_asked_for() -> None:
    def run() -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        desk, sink = streamed(return_token_ids=True, stream_options=options)
        desk.deliver(desk.rows(0, [TOKENS[:2], TOKENS[2:3]], FinishReason.LENGTH))
        first, second, last = sink.events()
        assert first["prompt_token_ids"] == [1, 2]
        assert first["usage"]["completion_tokens"] == 2
        assert "prompt_token_ids" not in second
        assert last["choices"] == []
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (2, 3)
        assert "cached_tokens" in last["usage"]["prompt_tokens_details"]

    in_loop(run)


def test_the_stop_token_is_among_the_ids() -> None:
    def run() -> None:
        body = collected([TOKENS[:2], [1]], FinishReason.EOS)
        assert body["choices"][0]["token_ids"] == [*TOKENS[:2], 1]
        assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", None)
        body = collected([[*TOKENS[:2], 9]], FinishReason.STOP_TOKEN, {"stop_token_ids": [9]})
        assert (body["choices"][0]["token_ids"], body["choices"][0]["stop_reason"]) == ([*TOKENS[:2], 9], 9)

    in_loop(run)


def test_a_whole_reply_has_every_field() -> None:
    def run() -> None:
        body = collected([TOKENS], FinishReason.LENGTH, return_token_ids=True)
        usage, created = body.pop("usage"), body.pop("created")
        assert usage["total_tokens"] == 2 + len(TOKENS)
        assert created > 0
        [choice] = body.pop("choices")
        assert choice == {
            "index": 0,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": TOKENS,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": None,
            "logprobs": None,
        }
        assert body == {
            "request_id": "generate-tokens-r",
            "model": "tiny-llama",
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": [1, 2],
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": "tokens",
        }

    in_loop(run)


def test_text_mode_has_text_and_spelled_logprobs() -> None:
    def run() -> None:
        body = collected([TOKENS], FinishReason.LENGTH, {"logprobs": 1}, logprobs=True, output_mode="text")
        [choice] = body["choices"]
        assert choice["text"] == tiny_tokenizer().decode(TOKENS)
        assert choice["token_ids"] == TOKENS
        assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [1] * len(TOKENS)
        assert choice["logprobs"]["content"][0]["token"] == tiny_tokenizer().decode(TOKENS[:1])
        desk, sink = streamed(output_mode="text")
        desk.deliver(desk.rows(0, [[token] for token in TOKENS], FinishReason.LENGTH))
        assert ids_of(sink) == TOKENS
        texts = [choice["text"] for event in sink.events() for choice in event["choices"]]
        assert "".join(texts) == tiny_tokenizer().decode(TOKENS)
        assert "" in texts, "tokens of a character that is not whole wait for nothing"

    in_loop(run)


def test_a_stop_string_ends_the_ids_with_the_token_that_completes_it() -> None:
    def run() -> None:
        for mode in ("tokens", "text"):
            desk, sink = streamed({"stop": "main"}, output_mode=mode)
            desk.deliver(desk.rows(0, [TOKENS]))
            last = sink.events()[-1]["choices"][0]
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", "main")
            sent = ids_of(sink)
            assert sent == TOKENS[: len(sent)]
            assert "main" in tiny_tokenizer().decode(sent)
            assert "main" not in tiny_tokenizer().decode(sent[:-1])

    in_loop(run)


def test_a_failure_is_an_event_after_all_tokens() -> None:
    def run() -> None:
        desk, sink = streamed()
        desk.deliver(desk.rows(0, [TOKENS[:3]]))
        desk.streams.fail(0, 0, StreamError(503, "engine_died", "The engine is gone."))
        *events, failed = sink.events()
        assert [choice["token_ids"] for event in events for choice in event["choices"]] == [TOKENS[:3]]
        assert failed["error"]["code"] == "engine_died"

    in_loop(run)


def test_logprobs_are_by_id() -> None:
    def run() -> None:
        body = collected([[5, 7]], FinishReason.LENGTH, {"logprobs": 1}, logprobs=True)
        logprob = float(str(np.float32(-5 / 7)))  # the fewest digits that read back
        entry = {"token_id": 5, "logprob": logprob, "rank": None}
        assert body["choices"][0]["logprobs"]["content"][0] == entry | {
            "token": "token_id:5",
            "top_logprobs": [entry, {"token_id": 0, "logprob": -1.5, "rank": 1}],
        }
        desk, sink = streamed({"logprobs": 1})
        desk.deliver(desk.rows(0, [[5], [7]], FinishReason.LENGTH, logprobs=True))
        content = [choice["logprobs"]["content"] for event in sink.events() for choice in event["choices"]]
        assert [each for part in content for each in part] == body["choices"][0]["logprobs"]["content"]

    in_loop(run)


def test_listed_tokens_have_no_ranks() -> None:
    def run() -> None:
        sampling = {"logprob_token_ids": [0]}
        body = collected([[5, 7]], FinishReason.LENGTH, sampling, logprobs=True)
        first, _ = body["choices"][0]["logprobs"]["content"]
        assert [(each["token_id"], each["rank"]) for each in first["top_logprobs"]] == [(5, None), (0, None)]

    in_loop(run)


def test_many_logprobs_are_the_same_in_pieces() -> None:
    names = TokenNames(TokenTable.from_tokenizer(tiny_tokenizer().raw))
    for width in (3, 3000):
        collector = LogprobCollector(names, alternatives=width)
        others = np.arange(width, dtype=np.int32)
        ids = np.array([[width - 1, *others], [width + 5, *others]], np.int32)
        values = -ids.astype(np.float32)
        for row in range(2):
            entries = Logprobs(
                np.zeros(1, np.int32), ids[row : row + 1], values[row : row + 1], np.ones(1, np.int32)
            )
            collector.add([int(ids[row, 0])], entries.split())
        taken = collector.take()
        assert taken is not None
        first, second = json.loads(b"".join(entries_by_id(taken)))
        assert (first["token_id"], first["rank"], len(first["top_logprobs"])) == (width - 1, width, width)
        assert (second["token_id"], second["rank"], len(second["top_logprobs"])) == (
            width + 5,
            None,
            width + 1,
        )
        assert [each["rank"] for each in second["top_logprobs"][1:]] == list(range(1, width + 1))


def test_experts_are_a_file_in_base64() -> None:
    def run() -> None:
        desk = Desk(tables_of(tiny_tokenizer().raw))
        plan = DIALECT.plan(tokens_body(return_routed_experts=True))
        reply = desk.collected(plan, format=DIALECT.reply_format(plan, "r"))
        stream = reply.choices[0].stream
        assert stream is not None
        reply.on_routes(stream, RoutedExperts(stream=0, layers=2, per_token=1, width=1, data=bytes(range(8))))
        desk.deliver(desk.rows(0, [TOKENS[:3]], FinishReason.LENGTH))
        body = json.loads(b"".join(reply.format.whole(reply)))
        made = np.load(io.BytesIO(base64.b64decode(body["choices"][0]["routed_experts"])))
        assert made.tolist() == [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]

    in_loop(run)


def test_the_reply_sees_only_rows_that_are_not_plain() -> None:
    """All others are written by columns, with the same ids."""

    def run() -> None:
        for mode in ("tokens", "text"):
            desk = Desk(tables_of(tiny_tokenizer().raw))
            plan = DIALECT.plan(tokens_body(stream=True, output_mode=mode))
            reply, sink = desk.streamed(plan, format=DIALECT.reply_format(plan, "r"))
            seen: list[int] = []
            own = reply.on_row

            def on_row(stream: Any, tokens: Any, *others: Any, seen: Any = seen, own: Any = own) -> None:
                seen += tokens
                own(stream, tokens, *others)

            reply.on_row = on_row  # type: ignore[method-assign]
            plain = tiny_tokenizer().encode("def main return", False)
            rows = [plain[:1], plain[1:2], plain, plain[:2], [4], plain[:1], [*plain, *plain], plain[:1]]
            desk.deliver(desk.rows(0, rows, FinishReason.LENGTH))
            assert ids_of(sink) == [id for row in rows for id in row]
            assert seen == [*plain[:1], 4, *plain[:1]], "the first row, a special token, and the last row"
            events = sink.events()
            assert len(events) == len(rows)
            assert {tuple(event["choices"][0]) for event in events[:-1]} == {tuple(events[0]["choices"][0])}
            if mode == "text":
                texts = [event["choices"][0]["text"] for event in events]
                sent = [id for row in rows for id in row]
                assert "".join(texts) == tiny_tokenizer().decode(sent, skip_special_tokens=True)

    in_loop(run)
