"""Rows of several tokens, as speculative decoding makes them, and the events that clients join.

Streams of every API run beside each other, on sockets. In each step every stream gets another number of
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.serve import ServeConfig
from penstock.dialects.messages.dialect import Messages
from penstock.dialects.responses.dialect import Responses
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.replies.reply import TextTables
from penstock.generation.replies.streamed import StreamedReply
from penstock.http.http2.flow_windows import FlowWindows
from penstock.http.write_target import WriteTarget
from penstock.metrics.bounds import EVENT_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS
from penstock.metrics.histogram import Histogram
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.row_metrics import RowMetrics
from penstock.wire.frames import FinishReason
from penstock.wire.regroup import join_rows
from tests.dialects.messages.serving import joined, read_events
from tests.dialects.messages.test_replies import without_ids
from tests.dialects.responses.reading import events_of, final_response
from tests.dialects.responses.test_replies import comparable
from tests.generation.planning import body, chat_body, planners, tiny_input_processor, tiny_tokenizer
from tests.generation.replying import GUARD, Desk, MemorySink, in_loop, read_stream, tables_of, within_text

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
    "{# <think></think> <tool_call></tool_call> #}"
)
LOOK = {"name": "look", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "look", "arguments": {"place": "caf\\u00e9", "n": [1, 2]}}</tool_call>'
PIECES = (
    "Good morning. ",
    'The "answer" is \\ 42, naïve 👍🏽.\n',
    "<think>It is “late”.</think>",
    "def main(): pass\n",
    "日本語 ",
    CALL,
)
WINDOW = 1 << 24


@dataclass
class Api:
    """One kind of request."""

    body: Callable[[dict[str, Any]], bytes]
    """The body of a streamed request, with further fields."""
    plan: Callable[[bytes], RequestPlan]
    format: Any = None
    """Makes the reply format of a plan; None: chat or completions."""
    chat: bool = False
    read: Callable[[MemorySink], Any] = lambda sink: None
    """What a client makes of the events."""
    stop: str = "stop"
    """The field of stop strings; empty: it has none."""
    scores: Sequence[dict[str, Any]] = ()
    """Fields that ask for logprobs and token ids."""


def read_choice(sink: MemorySink) -> Any:
    """Of completions, and of chat without tools: text, token ids and logprobs in step."""
    told = 0
    for event in sink.events():
        for choice in event.get("choices", ()):
            told += len(choice.get("token_ids") or ())
            usage = event.get("usage")
            if usage is not None and choice.get("token_ids"):
                # Tokens of an unfinished character have come, and are sent with its last one.
                assert told <= usage["completion_tokens"] <= told + 8
    return within_text(read_stream(sink))


def read_message(sink: MemorySink) -> Any:
    """Of chat with tools: content, reasoning and calls."""
    texts: dict[Any, str] = {}
    calls: dict[int, dict[str, str]] = {}
    end = None
    for event in sink.events():
        for choice in event["choices"]:
            delta = choice["delta"]
            for field in ("content", "reasoning", "reasoning_content"):
                texts[field] = texts.get(field, "") + (delta.get(field) or "")
            for piece in delta.get("tool_calls") or ():
                call = calls.setdefault(piece["index"], {"name": "", "arguments": ""})
                for field, text in piece["function"].items():
                    call[field] += text or ""
            assert end is None
            end = choice["finish_reason"]
    return texts, calls, end


@cache
def apis() -> dict[str, Api]:
    template = ChatTemplate({"default": TEMPLATE}, {})
    config, plain = ServeConfig(), planners()
    with_tools = planners(template=template)
    processor = tiny_input_processor(template=template)
    responses, messages = Responses(config, processor), Messages(config, processor)
    ids = {"return_token_ids": True}
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    of_chat = {"logprobs": True, "top_logprobs": 1}
    asked = {"input": "Hi.", "tools": [{"type": "function", **LOOK}]}
    tool = {"name": "look", "input_schema": {"type": "object"}}
    question = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1000, "tools": [tool]}
    return {
        "completions": Api(
            lambda fields: body(**({"max_tokens": 2000} | usage | fields)),
            plain.completion,
            read=read_choice,
            scores=[ids, {"logprobs": 1, **ids}],
        ),
        "chat": Api(
            lambda fields: chat_body(**({"max_tokens": 2000} | usage | fields)),
            plain.chat,
            chat=True,
            read=read_choice,
            scores=[ids, of_chat | ids],
        ),
        "chat with tools": Api(
            lambda fields: chat_body(tools=[{"type": "function", "function": LOOK}], **fields),
            with_tools.chat,
            chat=True,
            read=read_message,
        ),
        "responses": Api(
            lambda fields: json.dumps(asked | fields).encode(),
            responses.plan,
            format=lambda plan: responses.reply_format(plan, "r"),
            read=lambda sink: comparable(final_response(events_of(sink.data.decode()))),
            stop="",
            scores=[{"include": ["message.output_text.logprobs"], "top_logprobs": 1}],
        ),
        "messages": Api(
            lambda fields: json.dumps(question | fields).encode(),
            messages.plan,
            format=lambda plan: messages.reply_format(plan, "r"),
            read=lambda sink: without_ids(joined(read_events(sink))),
            stop="stop_sequences",
        ),
    }


@cache
def tables() -> TextTables:
    return tables_of(tiny_tokenizer().raw)


@cache
def guards() -> list[bool] | None:
    return tables().guarded(GUARD)


class SocketDesk(Desk):
    """Replies whose rows are written to sockets of HTTP/1.1, or frames of one connection of HTTP/2."""

    def __init__(self, *, frames: bool) -> None:
        self.frames = frames
        self.sinks: list[MemorySink] = []
        self.windows = FlowWindows()
        self.connection = self.windows.add_connection(self, WINDOW)
        self.columns = 0
        """Events that were written by columns."""
        super().__init__(tables())

    def __post_init__(self) -> None:
        super().__post_init__()
        metrics = RowMetrics(Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), Histogram(EVENT_BOUNDS))
        guarded = guards()
        self.streams = OutputProcessor(
            self.tables.plain, metrics, burst=self.burst, windows=self.windows, guarded=guarded
        )
        self.context.streams = self.streams

    def begin(self, output: Output) -> tuple[StreamedReply, MemorySink]:
        """Opens the stream whose handle is the number of those before it."""
        api = output.api
        plan = api.plan(api.body(output.fields | {"stream": True}))
        format = None if api.format is None else api.format(plan)
        number = len(self.sinks)
        reply, sink = self.streamed(plan, chat=api.chat, format=format)
        sink.write_target = WriteTarget(descriptor=number)
        if self.frames:
            window = self.windows.add_stream(self.connection, WINDOW)
            sink.write_target = WriteTarget(window=window, prefix=b"\0\0" + number.to_bytes(4, "big"))
        self.sinks.append(sink)
        [choice] = reply.choices
        assert choice.stream is not None
        assert choice.stream.handle == number
        return reply, sink

    def burst(self, descriptors: Any, data: bytes, sizes: Any) -> list[tuple[int, int]]:
        ends = np.cumsum(sizes).tolist()
        for number, start, end in zip(descriptors.tolist(), [0, *ends], ends, strict=False):
            size, _, rest = data[start:end].partition(b"\r\n")
            assert len(rest) == int(size, 16) + 2
            self._take(number, rest[:-2])
        return []

    def write_frames(self, frames: bytes) -> None:
        while frames:
            size = int.from_bytes(frames[:3], "big")
            self._take(int.from_bytes(frames[5:9], "big"), frames[9 : 9 + size])
            frames = frames[9 + size :]

    def _take(self, number: int, event: bytes) -> None:
        self.columns += 1
        self.sinks[number].write(event)


@dataclass
class Output:
    """One stream: its request, its tokens, and how it ends."""

    api: Api
    fields: dict[str, Any]
    tokens: list[int]
    finish: FinishReason


def run(outputs: Sequence[Output], cuts: Callable[[int, int], int], *, frames: bool) -> tuple[list[Any], int]:
    """What the clients of ``outputs`` have at the end, and how many events were written by columns. ``cuts``:
    tokens of a row, by step and stream."""
    found: list[Any] = []
    columns = 0

    def serve() -> None:
        nonlocal columns
        desk = SocketDesk(frames=frames)
        opened = [desk.begin(each) for each in outputs]
        sent, step = [0] * len(outputs), 0
        while any(at < len(each.tokens) for at, each in zip(sent, outputs, strict=True)):
            rows = []
            for number, each in enumerate(outputs):
                part = each.tokens[sent[number] : sent[number] + (cuts(step, number) if step else 1)]
                sent[number] += len(part)
                end = each.finish if sent[number] == len(each.tokens) else FinishReason.NONE
                scored = "logprobs" in each.fields or "include" in each.fields
                if part:
                    rows += desk.rows(number, [part], end, logprobs=scored)
            desk.streams.process_frame(0, join_rows(rows), float(step))
            step += 1
        assert not desk.streams.faults.counts
        assert [sink.ended for _, sink in opened] == ["finish"] * len(outputs)
        found.extend(each.api.read(sink) for each, (_, sink) in zip(outputs, opened, strict=True))
        columns = desk.columns

    in_loop(serve)
    return found, columns


@st.composite
def any_output(draw: st.DrawFn) -> Output:
    api = apis()[draw(st.sampled_from(sorted(apis())))]
    stops = bool(api.stop) and draw(st.booleans())
    pieces = PIECES[:-1] if stops else PIECES  # half a call is no JSON, which readers want
    text = "".join(draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=3)))
    fields: dict[str, Any] = {}
    if stops:
        start = draw(st.integers(0, len(text) - 1))
        stop = text[start : start + draw(st.integers(1, 9))]
        if stop.strip():  # the messages API refuses others
            fields[api.stop] = [stop]
    if api.scores and draw(st.booleans()):
        fields |= draw(st.sampled_from(api.scores))
    tokens = tiny_tokenizer().encode(text, False)
    if draw(st.booleans()):
        return Output(api, fields, tokens, FinishReason.LENGTH)
    return Output(api, fields, [*tokens, 1], FinishReason.EOS)


def check(data: st.DataObject) -> None:
    outputs = data.draw(st.lists(any_output(), min_size=1, max_size=4))
    widths = st.integers(1, 8)
    given_widths = data.draw(
        st.one_of(
            st.lists(widths, min_size=1, max_size=9),  # others in each row
            st.tuples(widths).map(list),  # as many in each row of all steps
        )
    )
    count = len(given_widths)

    def cuts(step: int, number: int) -> int:
        return given_widths[(7 * step + 3 * number) % count]

    frames = data.draw(st.booleans())
    got, _ = run(outputs, cuts, frames=frames)
    wanted, _ = run(outputs, lambda step, number: 1, frames=frames)
    assert got == wanted


@settings(max_examples=60)
@given(st.data())
def test_events_of_any_rows_say_what_those_of_single_tokens_say(data: st.DataObject) -> None:
    check(data)


@pytest.mark.slow
@settings(max_examples=1500)
@given(st.data())
def test_events_of_many_more_rows_say_the_same(data: st.DataObject) -> None:
    check(data)


@pytest.mark.parametrize("frames", [False, True])
@pytest.mark.parametrize("name", ["completions", "chat", "responses", "messages"])
def test_rows_of_plain_text_are_written_by_columns(name: str, frames: bool) -> None:
    """One event per row, but for the first and the last row, which the reply makes."""
    tokens = tiny_tokenizer().encode("Abc_def" * 40, False)
    api = apis()[name]
    fields = {"stream_options": {"include_usage": False}} if name in ("completions", "chat") else {}
    outputs = [Output(api, fields, tokens, FinishReason.LENGTH)] * 3
    rows = -(-(len(tokens) - 1) // 3)
    got, columns = run(outputs, lambda step, number: 3, frames=frames)
    assert columns == 3 * (rows - 1)
    assert got[0] == got[1]
