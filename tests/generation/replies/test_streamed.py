"""Streamed replies row by row: what is held, what is sent, and how they end."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from penstock.generation.parsers.calls import CallParser
from penstock.generation.parsers.formats import TOOL_FORMATS
from penstock.generation.parsers.message import MessageFormat
from penstock.generation.parsers.reasoning import ReasoningParser
from penstock.generation.replies import streamed
from penstock.generation.replies.reply import TextTables
from penstock.generation.replies.streamed import StreamedReply
from penstock.http.write_target import WriteTarget
from penstock.logging_setup import RateLimitedLog
from penstock.streaming.rows.row_writer import Path
from penstock.streaming.stream import StreamError
from penstock.wire.frames import FinishReason
from tests.generation.planning import body, chat_body, planners, tiny_tokenizer
from tests.generation.replying import PROMPT, Desk, MemorySink, in_loop, read_stream, tables_of

PLANNER = planners()
ERROR = StreamError(500, "engine_error", "it broke")


@cache
def tables() -> TextTables:
    return tables_of(tiny_tokenizer().raw)


def ids(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


def decoded(tokens: list[int]) -> str:
    return tiny_tokenizer().decode(tokens)


def open_stream(desk: Desk, **fields: Any) -> tuple[StreamedReply, MemorySink, int]:
    """A streamed completion of one choice: the reply, its connection, its handle."""
    reply, sink = desk.streamed(PLANNER.completion(body(stream=True, max_tokens=2000, **fields)))
    [choice] = reply.choices
    assert choice.stream is not None
    return reply, sink, choice.stream.handle


def within_loop(test: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        in_loop(test)

    run.__name__ = test.__name__
    return run


def texts(sink: MemorySink) -> list[str]:
    return [choice["text"] for event in sink.events() for choice in event.get("choices", ())]


# -- rows


@pytest.mark.parametrize("place", [1, 2, 3])
def test_no_token_overtakes_a_character_that_is_not_whole(place: int) -> None:
    def run() -> None:
        [first, second], [plain] = ids("é"), ids("a")
        tokens = [plain] * 5
        tokens[place], tokens[min(place + 1 + place % 2, 4)] = first, second
        desk = Desk(tables())
        _, sink, handle = open_stream(desk)
        desk.deliver(desk.rows(handle, [[token] for token in tokens], FinishReason.LENGTH))
        assert "".join(texts(sink)) == decoded(tokens)

    in_loop(run)


@within_loop
def test_headers_come_before_the_first_text_when_the_first_token_has_none() -> None:
    desk = Desk(tables())
    reply, sink, handle = open_stream(desk, ignore_eos=True)
    desk.deliver(desk.rows(handle, [[1], *([token] for token in ids("some text"))], FinishReason.LENGTH))
    assert reply.plan.base.ignore_eos
    assert sink.starts == 1  # the sink refuses bytes before the headers
    assert "".join(texts(sink)) == "some text"


@within_loop
def test_ids_and_logprobs_wait_for_their_text() -> None:
    desk = Desk(tables())
    _, sink, handle = open_stream(desk, return_token_ids=True, logprobs=1)
    [first, second], [plain] = ids("é"), ids("a")
    desk.deliver(desk.rows(handle, [[plain], [first]], logprobs=True))
    assert [choice["token_ids"] for event in sink.events() for choice in event["choices"]] == [[plain]]
    desk.deliver(desk.rows(handle, [[second]], logprobs=True))
    [choice] = sink.events()[-1]["choices"]
    assert (choice["text"], choice["token_ids"]) == ("é", [first, second])
    assert len(choice["logprobs"]["tokens"]) == 2


@within_loop
def test_a_stop_string_ends_the_stream_at_once_and_the_surplus_is_not_billed() -> None:
    desk = Desk(tables())
    _, sink, handle = open_stream(desk, stop="stop", stream_options={"include_usage": True})
    tokens = ids("one two stop three four")
    place = next(at for at in range(len(tokens)) if "stop" in decoded(tokens[:at]))
    desk.deliver(desk.rows(handle, [tokens[:1], tokens[1:]]))
    assert [stream.handle for stream in desk.engine_client.aborted] == [handle]
    assert desk.engine_client.stopped == 1
    assert sink.ended == "finish"
    reading = read_stream(sink)
    assert (reading.text, reading.finish_reason, reading.stop_reason) == ("one two ", "stop", "stop")
    assert reading.usage["completion_tokens"] == place < len(tokens)
    desk.deliver(desk.rows(handle, [tokens, []], FinishReason.ABORT))  # on its way when the engine was told
    assert len(desk.streams) == 0
    assert desk.outcomes == ["stop"]
    assert sink.over.result() is None


# -- clients that do not read


@within_loop
def test_what_a_client_does_not_read_becomes_one_event() -> None:
    desk = Desk(tables())
    reply, sink, handle = open_stream(desk)
    tokens = ids("a text of more than a few tokens, which are sent one by one")
    desk.deliver(desk.rows(handle, [[token] for token in tokens[:3]]))
    events = len(sink.events())
    reply.on_pause()
    desk.deliver(desk.rows(handle, [[token] for token in tokens[3:-1]]))
    assert len(sink.events()) == events
    reply.on_resume()
    assert len(sink.events()) == events + 1
    desk.deliver(desk.rows(handle, [tokens[-1:]], FinishReason.LENGTH))
    assert "".join(texts(sink)) == decoded(tokens)
    assert desk.outcomes == ["length"]


@within_loop
def test_ids_and_logprobs_of_a_slow_client_are_complete() -> None:
    desk = Desk(tables())
    reply, sink, handle = open_stream(desk, return_token_ids=True, logprobs=0)
    tokens = ids("some tokens, one by one")
    reply.on_pause()
    desk.deliver(desk.rows(handle, [[token] for token in tokens[:-1]], logprobs=True))
    assert sink.starts == 0
    reply.on_resume()
    desk.deliver(desk.rows(handle, [tokens[-1:]], FinishReason.LENGTH, logprobs=True))
    reading = read_stream(sink)
    assert (reading.text, reading.tokens) == (decoded(tokens), tokens)
    assert len(reading.logprobs["tokens"]) == len(tokens)


@within_loop
def test_rows_go_past_the_connection_only_while_nothing_waits_in_it() -> None:
    desk = Desk(tables())
    reply, sink, handle = open_stream(desk)
    stream = reply.choices[0].stream
    assert stream is not None
    paths = desk.streams._writer
    assert paths.path(handle) is Path.REPLY, "the headers come first"
    sink.write_target = WriteTarget(descriptor=7)
    frames = desk.rows(handle, [[token] for token in ids("some text and more")])
    desk.deliver(frames[:1])
    assert paths.path(handle) is Path.CHUNK
    sink.write_target = None
    reply.send_keep_alive(1.0, 2.0)  # a comment that the socket does not take at once
    assert paths.path(handle) is Path.SINK
    desk.deliver(frames[1:])
    assert "".join(texts(sink)) == "some text and more"


@within_loop
def test_choices_of_one_connection_are_written_in_order_of_their_rows() -> None:
    desk = Desk(tables())
    reply, sink = desk.streamed(PLANNER.completion(body(stream=True, max_tokens=2000, n=2)))
    sink.write_target = WriteTarget(descriptor=7)
    streams = [choice.stream for choice in reply.choices if choice.stream is not None]
    for stream in streams:
        desk.deliver(desk.rows(stream.handle, [[token] for token in ids("some text")]))
    assert [desk.streams._writer.path(stream.handle) for stream in streams] == [Path.SINK] * 2
    assert "".join(texts(sink)) == 2 * "some text"


@within_loop
def test_the_end_is_written_to_a_client_that_does_not_read() -> None:
    desk = Desk(tables())
    reply, sink, handle = open_stream(desk)
    tokens = ids("a text of a few tokens")
    desk.deliver(desk.rows(handle, [tokens[:1]]))
    reply.on_pause()
    desk.deliver(desk.rows(handle, [[token] for token in tokens[1:]], FinishReason.LENGTH))
    assert "".join(texts(sink)) == decoded(tokens)
    assert (sink.ended, sink.lines()[-1]) == ("finish", "data: [DONE]")


@pytest.mark.parametrize(
    ("fields", "least_tokens", "most_tokens"),
    [({}, 900, 1100), ({"return_token_ids": True}, 20, 60), ({"logprobs": 4}, 4, 5)],
)
def test_a_client_is_cut_when_its_backlog_is_full(
    fields: dict[str, Any],
    least_tokens: int,
    most_tokens: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is held counts about as many bytes as it has when it is sent."""

    def run() -> None:
        desk = Desk(tables(), max_backlog=3000)
        reply, sink, handle = open_stream(desk, **fields)
        [token] = ids("a")
        desk.deliver(desk.rows(handle, [[token]], logprobs=True))
        sink.unread_bytes = 2000
        reply.on_pause()
        given = 0
        while not sink.ended:
            desk.deliver(desk.rows(handle, [[token]], logprobs=True))
            given += 1
            assert given <= most_tokens
        assert given >= least_tokens
        assert (sink.ended, desk.outcomes) == ("cut", ["cut"])
        assert (len(desk.engine_client.aborted), desk.engine_client.stopped) == (1, 0)
        assert sink.over.result() is None

    monkeypatch.setattr(streamed, "_log_slow", RateLimitedLog(streamed.log))
    in_loop(run)
    [line] = caplog.messages
    assert "--max-stream-backlog allows 3000" in line


@within_loop
def test_a_client_that_reads_again_has_its_whole_backlog_again() -> None:
    desk = Desk(tables(), max_backlog=400)
    reply, sink, handle = open_stream(desk)
    [token] = ids("a")
    desk.deliver(desk.rows(handle, [[token]]))
    for _ in range(20):
        reply.on_pause()
        desk.deliver(desk.rows(handle, [[token]] * 300))
        reply.on_resume()
    assert not sink.ended
    assert "".join(texts(sink)) == "a" * 6001


# -- failures


@pytest.mark.parametrize("chat", [False, True])
def test_all_that_was_generated_comes_before_the_error(chat: bool) -> None:
    def run() -> None:
        desk = Desk(tables())
        fields: dict[str, Any] = {
            "stream": True,
            "max_tokens": 100,
            "stop": "and more",
            "return_token_ids": True,
        }
        plan = PLANNER.chat(chat_body(**fields)) if chat else PLANNER.completion(body(**fields))
        _, sink = desk.streamed(plan, chat=chat)
        tokens = [*ids("all of this and mor"), ids("é")[0]]  # held: a possible stop, half a character
        desk.deliver(desk.rows(0, [[token] for token in tokens]))
        desk.streams.fail(0, 0, ERROR)
        *choices, error = sink.events()
        assert error["error"]["code"] == "engine_error"
        told = [choice for event in choices for choice in event["choices"]]
        text = "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in told)
        assert text == "all of this and mor\ufffd"
        assert [token for choice in told for token in choice.get("token_ids", [])] == tokens
        assert all(choice["finish_reason"] is None for choice in told)
        assert "data: [DONE]" not in sink.lines()
        assert (sink.ended, desk.outcomes, len(desk.streams)) == ("finish", ["error"], 0)
        assert sink.over.result() is None

    in_loop(run)


@within_loop
def test_tokens_without_text_are_told_before_the_error() -> None:
    desk = Desk(tables())
    _, sink, handle = open_stream(desk, return_token_ids=True, ignore_eos=True)
    desk.deliver(desk.rows(handle, [ids("a"), [1], [1]]))
    desk.streams.fail(0, handle, ERROR)
    told = [event["choices"][0]["token_ids"] for event in sink.events()[:-1]]
    assert told == [ids("a"), [1, 1]]


@within_loop
def test_a_failure_before_anything_was_sent_is_left_to_the_http_status() -> None:
    desk = Desk(tables())
    _, sink, handle = open_stream(desk)
    desk.streams.fail(0, handle, ERROR)
    assert (sink.data, sink.ended) == (b"", "")
    assert sink.over.result() == ERROR


@within_loop
def test_what_was_generated_and_not_yet_sent_is_told_also_when_it_is_the_first() -> None:
    desk = Desk(tables())
    _, half, handle = open_stream(desk)
    desk.deliver(desk.rows(handle, [[ids("é")[0]]]))
    assert half.data == b""
    desk.streams.fail(0, handle, ERROR)
    *told, error = half.events()
    assert [event["choices"][0]["text"] for event in told] == ["\ufffd"]
    assert "error" in error
    unread, sink, handle = open_stream(desk)
    unread.on_pause()
    desk.deliver(desk.rows(handle, [ids("a")]))
    desk.streams.fail(0, handle, ERROR)
    assert [event["choices"][0]["text"] for event in sink.events()[:-1]] == ["a"]
    assert (half.over.result(), sink.over.result()) == (None, None)


@within_loop
def test_one_failed_choice_ends_all_with_one_error() -> None:
    desk = Desk(tables())
    _, sink = desk.streamed(PLANNER.completion(body(stream=True, n=3, temperature=1.0, stop="ab!")))
    for handle in range(3):
        desk.deliver(desk.rows(handle, [ids("x"), ids("ab")]))
    desk.deliver(desk.rows(1, [ids("c")], FinishReason.LENGTH))
    desk.streams.fail(0, 2, ERROR)
    *events, error = sink.events()
    text = ["", "", ""]
    for event in events:
        for choice in event["choices"]:
            text[choice["index"]] += choice["text"]
    assert text == ["xab", "xabc", "xab"]
    assert "error" in error
    assert [stream.index for stream in desk.engine_client.aborted] == [0]
    assert desk.outcomes == ["error"]
    assert sink.over.result() is None


@within_loop
def test_a_stream_that_its_engine_aborts_ends_with_what_there_is() -> None:
    desk = Desk(tables())
    _, sink, handle = open_stream(desk)
    desk.deliver(desk.rows(handle, [ids("a"), [ids("é")[0]], []], FinishReason.ABORT))
    choices = [event["choices"][0] for event in sink.events()]
    assert "".join(choice["text"] for choice in choices) == "a\ufffd"
    assert [choice["finish_reason"] for choice in choices][-1] == "abort"
    assert (desk.outcomes, sink.over.result()) == (["abort"], None)


@within_loop
def test_a_stream_that_is_aborted_before_its_first_token_has_no_text() -> None:
    desk = Desk(tables())
    _, sink, handle = open_stream(desk)
    desk.deliver(desk.rows(handle, [[]], FinishReason.ABORT))
    [event] = sink.events()
    assert (event["choices"][0]["text"], event["choices"][0]["finish_reason"]) == ("", "abort")


@within_loop
def test_a_client_that_left_is_an_abort_and_gets_nothing_more() -> None:
    desk = Desk(tables())
    reply, sink, handle = open_stream(desk)
    desk.deliver(desk.rows(handle, [ids("a")]))
    sent = len(sink.data)
    reply.on_disconnect()
    desk.deliver(desk.rows(handle, [ids("b"), []], FinishReason.ABORT))
    assert len(sink.data) == sent
    assert (desk.outcomes, len(desk.streams)) == (["abort"], 0)
    assert sink.over.result() is None


# -- what comes first


@within_loop
def test_prompt_ids_come_once_with_the_first_event() -> None:
    desk = Desk(tables())
    _, sink, handle = open_stream(desk, return_token_ids=True)
    desk.deliver(desk.rows(handle, [[ids("é")[0]], [ids("é")[1]], ids("a")], FinishReason.LENGTH))
    assert [event["choices"][0].get("prompt_token_ids") for event in sink.events()] == [[1, 2], None]


@pytest.mark.parametrize("chat", [False, True])
def test_what_a_connector_says_comes_with_the_finish_reason(chat: bool) -> None:
    @within_loop
    def run() -> None:
        desk = Desk(tables())
        plan = (PLANNER.chat(chat_body(stream=True))) if chat else PLANNER.completion(body(stream=True))
        _, sink = desk.streamed(plan, chat=chat)
        frames = desk.rows(0, [ids("a"), ids("b")], FinishReason.LENGTH)
        frames[-1].kv_transfer_params = {0: b'{"remote_block_ids":[7]}'}
        desk.deliver(frames)
        *others, last = sink.events()
        assert last["kv_transfer_params"] == {"remote_block_ids": [7]}
        assert last["choices"][0]["finish_reason"] == "length"
        assert not any("kv_transfer_params" in event for event in others)

    run()


@within_loop
def test_a_whole_reply_has_what_a_connector_says() -> None:
    desk = Desk(tables())
    reply = desk.collected(PLANNER.completion(body()))
    frames = desk.rows(0, [ids("a")], FinishReason.LENGTH)
    frames[-1].kv_transfer_params = {0: b'{"remote_block_ids":[7]}'}
    desk.deliver(frames)
    assert json.loads(b"".join(reply.format.whole(reply)))["kv_transfer_params"] == {"remote_block_ids": [7]}


@within_loop
def test_echo_comes_first() -> None:
    desk = Desk(tables())
    prompt = type(PROMPT)(PROMPT.ids, PROMPT.length, 'the "prompt"')
    plan = PLANNER.completion(body(stream=True, echo=True))
    _, sink = desk.streamed(plan, prompt)
    desk.deliver(desk.rows(0, [ids("a"), ids("b")], FinishReason.LENGTH))
    assert texts(sink) == ['the "prompt"a', "b"]


# -- parsers


@within_loop
def test_a_parser_sees_only_rows_that_may_matter_to_it() -> None:
    text = 'Hello there, this is text.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> after'
    plan = PLANNER.chat(chat_body(stream=True, max_tokens=2000))
    plan.format = MessageFormat(tools=partial(CallParser, TOOL_FORMATS["hermes"]))
    desk = Desk(tables())
    reply, sink = desk.streamed(plan, chat=True)
    seen: list[int] = []
    on_row = reply.on_row
    reply.on_row = lambda *row: (seen.extend(row[1]), on_row(*row))  # type: ignore[method-assign]
    [choice] = reply.choices
    assert choice.stream is not None
    tokens = ids(text)
    desk.deliver(desk.rows(choice.stream.handle, [[token] for token in tokens], FinishReason.LENGTH))
    deltas = [event["choices"][0]["delta"] for event in sink.events() if event.get("choices")]
    content = "".join(delta.get("content", "") for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert content == "Hello there, this is text. after"
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    first = decoded(seen)[:20]
    assert len(first.partition("<")[0]) < 10, f"the parser saw {first!r}"


@within_loop
def test_reasoning_passes_by_its_parser_and_stays_reasoning() -> None:
    plan = PLANNER.chat(chat_body(stream=True, max_tokens=2000))
    plan.format = MessageFormat(reasoning=partial(ReasoningParser, "<think>"))
    desk = Desk(tables())
    reply, sink = desk.streamed(plan, chat=True)
    seen: list[int] = []
    on_row = reply.on_row
    reply.on_row = lambda *row: (seen.extend(row[1]), on_row(*row))  # type: ignore[method-assign]
    [choice] = reply.choices
    assert choice.stream is not None
    tokens = ids("I think a while about this, and then some more.</think>The answer is 42, as ever.")
    desk.deliver(desk.rows(choice.stream.handle, [[token] for token in tokens], FinishReason.LENGTH))
    deltas = [event["choices"][0]["delta"] for event in sink.events() if event.get("choices")]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == (
        "I think a while about this, and then some more."
    )
    assert "".join(delta.get("content", "") for delta in deltas) == "The answer is 42, as ever."
    assert len(seen) < len(tokens) / 2, "most rows were the reply's"


# -- versions of the weights


@within_loop
def test_the_last_event_of_a_choice_says_which_weights_made_it() -> None:
    desk = Desk(tables())
    _, sink, handle = open_stream(desk, return_weight_versions=True, stop="c")
    desk.streams.switch_weights(0, "one")
    desk.deliver(desk.rows(handle, [ids("a"), ids("b")]))
    desk.streams.switch_weights(0, "two")
    desk.deliver(desk.rows(handle, [ids("b")]))
    desk.streams.switch_weights(0, "three")
    desk.deliver(desk.rows(handle, [ids("bcaa")]))  # the last two come after the stop string
    choices = [event["choices"][0] for event in sink.events()]
    assert [choice.get("weight_versions") for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["weight_versions"] == [
        {"start": 0, "end": 2, "version": "one"},
        {"start": 2, "end": 3, "version": "two"},
        {"start": 3, "end": 5, "version": "three"},
    ]


@within_loop
def test_the_last_plain_row_says_it_as_well() -> None:
    desk = Desk(tables())
    _, sink, handle = open_stream(desk, return_weight_versions=True)
    desk.streams.switch_weights(0, "one")
    desk.deliver(desk.rows(handle, [ids("a"), ids("b")], FinishReason.LENGTH))
    assert sink.events()[-1]["choices"][0]["weight_versions"] == [{"start": 0, "end": 2, "version": "one"}]


@within_loop
def test_a_reply_that_is_aborted_before_its_first_token_has_no_time_of_that() -> None:
    desk = Desk(tables())
    reply, _, handle = open_stream(desk)
    desk.deliver(desk.rows(handle, [[]], FinishReason.ABORT))
    assert (reply.first_token_at, desk.outcomes) == (None, ["abort"])
