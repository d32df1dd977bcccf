"""Every stream says the same however it is cut."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.gateway.requests.apis import VECTOR_APIS
from penstock.gateway.responses.event_reader import LARGE_BYTES
from penstock.gateway.responses.expected_reply import ExpectedReply, expected_reply, make_observer
from penstock.gateway.responses.held_bytes import HeldBytes
from penstock.gateway.responses.outcome import SUCCESSFUL, Outcome, TransportResult, classify_outcome
from penstock.gateway.responses.response_observer import (
    MAX_ERROR_BYTES,
    Observation,
    ReplyObserver,
    StreamObserver,
)
from penstock.gateway.responses.token_usage import ReportedUsage
from penstock.streaming.sse_parser import MAX_LINES, SSEParser
from tests.gateway.foreign_streams import STREAMS as FOREIGN
from tests.gateway.foreign_streams import ForeignStream
from tests.gateway.streams import ALL, FAILED, FLAT_ERROR, ROLE, TEXT, USAGE, Recording, _sse
from tests.golden_replies import load_cases

by_name = pytest.mark.parametrize("recording", ALL, ids=lambda recording: recording.name)
PATH = "/v1/completions"
STREAMS = {
    case["name"]: case["response_body"].encode()
    for case in load_cases()
    if case["response_content_type"].startswith("text/event-stream")
}


def watch(chunks: list[bytes], *, strip_usage: bool = False) -> tuple[bytes, Observation]:
    """What is passed on, and what is seen; chunk i comes at time i."""
    observer = StreamObserver(strip_usage)
    out = b"".join(observer.feed(chunk, float(index)) for index, chunk in enumerate(chunks))
    return out + observer.finish(float(len(chunks))), observer.seen


def check(recording: Recording, chunks: list[bytes]) -> None:
    out, seen = watch(chunks)
    assert out == recording.raw
    stripped, also = watch(chunks, strip_usage=True)
    assert stripped == (recording.raw if recording.stripped is None else recording.stripped)
    for observation in (seen, also):
        assert observation.token_events == recording.token_events
        assert observation.usage == recording.usage
        assert (observation.error is not None) == recording.error
        assert classify_outcome(TransportResult.COMPLETE, 200, observation, PATH) == recording.outcome


@by_name
def test_cut_at_every_byte(recording: Recording) -> None:
    for at in range(len(recording.raw) + 1):
        check(recording, [recording.raw[:at], recording.raw[at:]])


@by_name
@pytest.mark.parametrize("size", [1, 2, 7, 64, 1 << 20])
def test_in_chunks(recording: Recording, size: int) -> None:
    check(recording, [recording.raw[at : at + size] for at in range(0, len(recording.raw), size)])


@pytest.mark.parametrize("name", STREAMS)
def test_recorded_streams_of_vllm(name: str) -> None:
    """However they are cut, all says what it says in one piece."""
    raw = STREAMS[name]
    _, whole = watch([raw])
    assert classify_outcome(TransportResult.COMPLETE, 200, whole, PATH) in SUCCESSFUL
    assert whole.token_events > 1
    assert (whole.usage is not None) == (b'"usage":{' in raw)
    cuts = [[raw[:at], raw[at:]] for at in range(len(raw) + 1)]
    cuts += [[raw[at : at + size] for at in range(0, len(raw), size)] for size in (1, 2, 7, 64)]
    for chunks in cuts:
        out, seen = watch(chunks)
        assert out == raw
        assert (seen.token_events, seen.usage, seen.ended) == (whole.token_events, whole.usage, True)
        assert seen.error is None
        assert seen.content_problem is None


@pytest.mark.parametrize("stream", FOREIGN, ids=lambda stream: stream.name)
@pytest.mark.parametrize("strip_usage", [False, True])
def test_streams_of_other_servers(stream: ForeignStream, strip_usage: bool) -> None:
    expects: ExpectedReply = "stream" if stream.generates else "anything"
    for size in (1, 7, 100, 1 << 20):
        observer = make_observer(
            200,
            [(b"content-type", b"text/event-stream")],
            expects,
            on_response=lambda id: None,
            strip_usage=strip_usage,
            held=HeldBytes(),
        )
        pieces = [stream.raw[at : at + size] for at in range(0, len(stream.raw), size)]
        out = b"".join(observer.feed(piece, 0.0) for piece in pieces) + observer.finish(0.0)
        seen = observer.seen
        assert strip_usage or out == stream.raw
        assert (seen.content_problem, seen.error, seen.unread) == (None, None, "")
        assert (seen.token_events, seen.usage) == (stream.tokens, stream.usage)
        assert not seen.lacks_end
        assert classify_outcome(TransportResult.COMPLETE, 200, seen, stream.path) == stream.outcome


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (200, [(b"content-type", b"text/html")], "the answer to a streamed request is 'text/html'"),
        (
            200,
            [(b"content-type", b"a; charset=latin1")],
            "its content type is 'a; charset=latin1', not UTF-8",
        ),
        (200, [(b"content-encoding", b"gzip")], "its content-encoding is 'gzip'"),
        (
            200,
            [(b"content-type", b"application/vnd.safetensors; frames=u64")],
            "its content type is 'application/vnd.safetensors; frames=u64'",
        ),
        (308, [(b"location", b"https://elsewhere")], "a redirect (308) instead of an answer"),
    ],
)
def test_what_is_wrong_with_a_head_is_told_as_text(
    status: int, headers: list[tuple[bytes, bytes]], said: str
) -> None:
    observer = make_observer(
        status, headers, "stream", on_response=lambda id: None, strip_usage=False, held=HeldBytes()
    )
    assert said in (observer.seen.content_problem, observer.seen.unread)


def test_times_are_those_of_token_events() -> None:
    _, seen = watch([_sse(ROLE), b": comment\n\n", _sse(TEXT), _sse(TEXT), _sse(USAGE, "[DONE]")])
    assert (seen.first_token_at, seen.last_token_at) == (2.0, 3.0)


def test_bytes_after_nonsense_are_relayed() -> None:
    out, seen = watch([b"data: {\n\n", b"whatever", b" comes"], strip_usage=True)
    assert out == b"data: {\n\nwhatever comes"
    assert seen.content_problem


PADDING = '"logprobs":[%s0]' % ("0, " * LARGE_BYTES)


@pytest.mark.parametrize(
    ("event", "tokens"),
    [
        ('{"choices":[{"text":"a",%s}]}', 1),
        ('{"choices":[{"text":"",%s}]}', 0),
        ('{"choices":[{"delta":{"content":"a"},%s}]}', 1),
        ('{"choices":[{"delta":{"tool_calls": [ {} ]},%s}]}', 1),
        ('{"choices":[{"delta":{"tool_calls":[]},%s}]}', 0),
        ('{"choices":[],%s,"usage":{"prompt_tokens":7,"completion_tokens":3}}', 0),
        ('{"choices":null,%s,"usage":{"prompt_tokens":7}}', 0),
        ('{"type":"content_block_delta","delta":{"text":"a",%s}}', 1),
        ('{"type":"content_block_delta","delta":{"text":"",%s}}', 0),
        ('{"choices":[{"text":"a",%s}],"error":{"message":"x"}}', 1),
        ('{"choices":{"text":"a",%s}}', 0),
        ('{"choices":[{"text":"a",%s]}', 0),
    ],
)
def test_a_large_event_says_the_same_as_a_small_one(event: str, tokens: int) -> None:
    outs, seens = zip(
        *(
            watch([_sse(event % padding, "[DONE]")], strip_usage=True)
            for padding in ('"logprobs":[]', PADDING)
        ),
        strict=True,
    )
    small, large = seens
    assert small.token_events == large.token_events == tokens
    assert (small.usage, small.error) == (large.usage, large.error)
    assert (small.content_problem is None) == (large.content_problem is None)
    assert (outs[0] == _sse("[DONE]")) == (outs[1] == _sse("[DONE]"))


def test_an_event_may_have_many_lines_however_they_are_cut() -> None:
    event = b"data:\r\n" * (MAX_LINES // 2) + b"data: [DONE]\r\n\r\n"
    for size in (1, 3, 1 << 20):
        _, seen = watch([event[at : at + size] for at in range(0, len(event), size)])
        assert seen.unread != f"an event of more than {MAX_LINES} lines"


@pytest.mark.parametrize("line", [b":\n", b"data:\n", b"x\r\n"])
def test_an_event_of_endless_lines_is_relayed_unread(line: bytes) -> None:
    chunk = line * 1000
    out, seen = watch([chunk] * 20 + [b"\n"])
    assert out == chunk * 20 + b"\n"
    assert seen.unread == f"an event of more than {MAX_LINES} lines"
    assert classify_outcome(TransportResult.COMPLETE, 200, seen, PATH) == Outcome.OK_WITHOUT_USAGE


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}, Outcome.OK),
        ({"choices": []}, Outcome.OK_WITHOUT_USAGE),
        ({"error": {"message": "no"}}, Outcome.MODEL_SERVER_ERROR),
        ({"object": "response", "status": "failed", "error": None}, Outcome.MODEL_SERVER_ERROR),
        ({"object": "response", "status": "queued", "usage": None}, Outcome.OK),
        ({"object": "response", "status": "incomplete", "usage": {"input_tokens": 1}}, Outcome.OK),
        ({"type": "error", "error": {"type": "api_error", "message": "no"}}, Outcome.MODEL_SERVER_ERROR),
    ],
)
def test_whole_replies(body: object, outcome: Outcome) -> None:
    observer = ReplyObserver()
    raw = msgspec.json.encode(body)
    assert observer.feed(raw[:5], 0.0) + observer.feed(raw[5:], 0.0) + observer.finish(0.0) == raw
    assert classify_outcome(TransportResult.COMPLETE, 200, observer.seen, PATH) == outcome


def test_prompt_tokens_mean_the_same_in_all_apis() -> None:
    """Those of messages exclude what was read from the cache, or written to it."""
    counts = []
    for usage in (
        {"prompt_tokens": 30, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 20}},
        {"input_tokens": 30, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 20}},
        {
            "input_tokens": 6,
            "output_tokens": 2,
            "cache_read_input_tokens": 20,
            "cache_creation_input_tokens": 4,
        },
    ):
        observer = ReplyObserver()
        observer.feed(msgspec.json.encode({"usage": usage}), 0.0)
        observer.finish(0.0)
        counts.append(observer.seen.usage)
    assert counts == [ReportedUsage(30, 2, 20)] * 3


@pytest.mark.parametrize("raw", [FAILED, FLAT_ERROR], ids=["failed", "error"])
def test_the_error_of_a_response_says_why(raw: bytes) -> None:
    _, seen = watch([raw])
    assert seen.error == "server_error"
    assert b"out of memory" in seen.excerpt


def test_what_has_no_usage_to_tell_is_not_blamed_for_telling_none() -> None:
    observer = ReplyObserver()
    observer.feed(b'{"object":"list","data":[]}', 0.0)
    observer.finish(0.0)
    assert classify_outcome(TransportResult.COMPLETE, 200, observer.seen, "/v1/models") == Outcome.OK


def test_a_reply_that_is_not_json() -> None:
    observer = ReplyObserver()
    observer.feed(b"<html>", 0.0)
    observer.finish(0.0)
    assert classify_outcome(TransportResult.COMPLETE, 200, observer.seen, PATH) == Outcome.CONTENT_ERROR


@pytest.mark.parametrize("ending", list(TransportResult))
def test_a_stream_whose_terminator_was_relayed_is_whole(ending: TransportResult) -> None:
    _, seen = watch([_sse(TEXT, USAGE, "[DONE]")])
    assert classify_outcome(ending, 200, seen, PATH) == Outcome.OK


@pytest.mark.parametrize(
    ("ending", "status", "outcome"),
    [
        (TransportResult.BROKEN, None, Outcome.NETWORK_ERROR),
        (TransportResult.BROKEN, 200, Outcome.NETWORK_ERROR),
        (TransportResult.TIMEOUT, 200, Outcome.NETWORK_ERROR),
        (TransportResult.CLIENT_GONE, None, Outcome.CLIENT_DISCONNECT),
        (TransportResult.CLIENT_GONE, 200, Outcome.CLIENT_DISCONNECT),
        (TransportResult.COMPLETE, 500, Outcome.MODEL_SERVER_ERROR),
        (TransportResult.COMPLETE, 404, Outcome.CLIENT_ERROR),
        (TransportResult.COMPLETE, 200, Outcome.NETWORK_ERROR),
    ],
)
def test_replies_without_content(ending: TransportResult, status: int | None, outcome: Outcome) -> None:
    assert classify_outcome(ending, status, Observation(), PATH) == outcome


FINISH = b'"finish_reason":"stop"'


@pytest.mark.parametrize("padding", [0, 65 << 10])
@pytest.mark.parametrize(
    ("choices", "lacks_end"),
    [
        (b'{"index":0,"text":"","finish_reason":null}', True),
        (b'{"index":0,"text":"",' + FINISH + b"}", False),
        (b'{"index":0,"text":"a",' + FINISH + b"}", False),
    ],
)
def test_after_a_finish_reason_nothing_but_the_terminator_lacks(
    choices: bytes, lacks_end: bool, padding: int
) -> None:
    observer = StreamObserver()
    text = b'data: {"choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
    observer.feed(text, 0.0)
    assert observer.seen.lacks_end
    observer.feed(b'data: {"choices":[%b],"x":"%b"}\n\n' % (choices, b"x" * padding), 0.0)
    assert observer.seen.lacks_end is lacks_end
    observer.feed(text, 0.0)
    assert observer.seen.lacks_end, "it went on"
    observer.feed(b"data: [DONE]\n\n", 0.0)
    assert not observer.seen.lacks_end


class CountingParser(SSEParser):
    """Counts how often its incomplete event is copied."""

    copies = 0

    @property
    def pending(self) -> bytes:
        self.copies += 1
        return super().pending


def test_a_long_event_is_not_copied_with_every_piece() -> None:
    parser = CountingParser()
    observer = StreamObserver(strip_usage=True, _parser=parser)
    event = b'data: {"choices":[{"text":"%b"}]}\n\n' % (b"a" * 100_000)
    passed_on = [observer.feed(event[at : at + 1000], 0.0) for at in range(0, len(event), 1000)]
    assert b"".join(passed_on) == event
    assert parser.copies == 0


def test_nothing_of_what_was_held_is_lost_when_an_event_is_too_large() -> None:
    observer = StreamObserver(strip_usage=True, _parser=SSEParser(max_event_bytes=100))
    pieces = [b"data: {", b'"choices":[]}\n\ndata: ' + b"a" * 200, b"b\n\n"]
    passed_on = [observer.feed(piece, 0.0) for piece in pieces]
    assert passed_on[0] == b""
    assert b"".join(passed_on) == b"".join(pieces)
    assert observer.seen.unread


def test_replies_beyond_the_bound_of_all_are_relayed_unread() -> None:
    held = HeldBytes(most=100)
    first, second, third = (ReplyObserver(held=held) for _ in range(3))
    body = b'{"usage":{"prompt_tokens":3,"completion_tokens":2}}'
    assert first.feed(body, 0.0) == second.feed(body, 0.0) == body
    assert not first.seen.unread
    assert second.seen.unread
    assert held.held == len(body)
    assert second.finish(0.0) == first.finish(0.0) == b""
    assert (first.seen.usage, second.seen.usage) == (ReportedUsage(3, 2), None)
    assert classify_outcome(TransportResult.COMPLETE, 200, second.seen, PATH) == Outcome.OK_WITHOUT_USAGE
    third.feed(body, 0.0)
    third.close()
    assert held.held == 0


@pytest.mark.parametrize("strip_usage", [False, True])
def test_incomplete_events_beyond_the_bound_of_all_are_relayed_unread(strip_usage: bool) -> None:
    held = HeldBytes(most=100)
    first, second = (StreamObserver(strip_usage, held=held) for _ in range(2))
    first.feed(_sse(TEXT) + b"data: " + b"x" * 60, 0.0)
    pieces = [_sse(TEXT), b'data: {"choices":[{"text":"' + b"x" * 60, b'"}]}\n\n' + _sse("[DONE]")]
    assert b"".join(second.feed(piece, 0.0) for piece in pieces) + second.finish(0.0) == b"".join(pieces)
    assert not first.seen.unread
    assert second.seen.unread
    assert second.seen.token_events == 1
    assert not second.seen.lacks_end
    assert classify_outcome(TransportResult.COMPLETE, 200, second.seen, PATH) == Outcome.OK_WITHOUT_USAGE
    assert held.held == 66
    first.feed(b"\n\n", 0.0)
    assert held.held == 0


BEGUN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("begun", [b"", BEGUN])
@pytest.mark.parametrize("pad", [0, 65 << 10])
@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ('data: {"error":{"message":"x","code":500}PAD}', "500"),
        ('data: {"error":"x"PAD}', ""),
        ('data: {"choices":[],"error":{"type":"server_error"}PAD}', "server_error"),
        ('data: {"object":"error","message":"x","code":40303PAD}', "40303"),
        ('data: {"message":"x","type":"InternalServerError"PAD}', "InternalServerError"),
        ('data: {"status_code":500,"message":"x"PAD}', ""),
        ('data: {"detail":"x"PAD}', ""),
        ('data: {"errors":[{"message":"x"}]PAD}', ""),
        ('data: {"choices":[{"index":0,"delta":{},"finish_reason":"error"}]PAD}', ""),
        ('event: error\ndata: {"message":"x"PAD}', ""),
        ('event: error\ndata: {"choices":[],"message":"x"PAD}', ""),
        ("event: error\ndata: out of memory", ""),
        ('data: {"type":"error","error":{"type":"overloaded_error"}PAD}', "overloaded_error"),
        ('data: {"type":"error","code":"server_error","message":"m"PAD}', "server_error"),
        ('data: {"type":"response.failed","response":{"error":{"code":"e"}}PAD}', "e"),
        ('data: {"type":"response.completed","response":{"status":"failed"}PAD}', "response.completed"),
    ],
)
def test_an_error_in_a_stream_is_an_error(begun: bytes, pad: int, event: str, kind: str) -> None:
    """In the shape of any API, or of a framework, also where the stream then ends as good ones do."""
    observer = StreamObserver()
    padding = f',"pad":"{"x" * pad}"' if pad else ""
    observer.feed(begun + event.replace("PAD", padding).encode() + b"\n\n" + DONE, 1.0)
    observer.finish(1.0)
    outcome = classify_outcome(TransportResult.COMPLETE, 200, observer.seen, "/v1/chat/completions")
    assert (outcome, observer.seen.error) == (Outcome.MODEL_SERVER_ERROR, kind)


@pytest.mark.parametrize(
    "event",
    [
        '{"choices":[],"error":null}',
        '{"choices":[{"index":0,"delta":{"content":"\\"finish_reason\\":\\"error\\""},"error":null}]}',
        '{"type":"ping","message":"x"}',
        '{"choices":[],"prompt_filter_results":[{"message":"x"}]}',
        '{"object":"chat.completion.chunk","message":"loading"}',
    ],
)
def test_what_is_none_is_not(event: str) -> None:
    observer = StreamObserver()
    observer.feed(b"data: %b\n\n" % event.encode() + DONE, 1.0)
    assert (observer.seen.error, observer.seen.content_problem) == (None, None)


@pytest.mark.parametrize("pad", [0, 65 << 10])
@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "x"}},
        {"error": "x", "choices": [{"text": "a"}]},
        {"type": "error", "error": {"type": "api_error"}},
        {"type": "error", "message": "x"},
        {"message": "x", "type": "InternalServerError", "code": 500},
        {"message": "Internal Server Error"},
        {"detail": "x"},
        {"object": "response", "status": "failed"},
        {"choices": [{"text": "a"}, {"finish_reason": "error"}]},
        [{"error": {"code": 500}}],
    ],
)
def test_an_error_in_a_whole_reply_is_an_error(body: Any, pad: int) -> None:
    if pad and isinstance(body, dict):
        for choice in body.get("choices", ()):
            choice["pad"] = "x" * pad
    observer = ReplyObserver()
    observer.feed(msgspec.json.encode(body), 1.0)
    observer.finish(1.0)
    seen = observer.seen
    path = "/v1/chat/completions"
    assert classify_outcome(TransportResult.COMPLETE, 200, seen, path) is Outcome.MODEL_SERVER_ERROR


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/rerank", "/score", "/v1/images/edits"])
@pytest.mark.parametrize(
    ("raw", "outcome", "kind"),
    [
        (b'{"error":{"message":"x","code":500}}', Outcome.MODEL_SERVER_ERROR, "500"),
        (b'{"error":"x"}', Outcome.MODEL_SERVER_ERROR, ""),
        (b'{"object":"error","message":"x","type":"E"}', Outcome.MODEL_SERVER_ERROR, "E"),
        (b'[{"error":"x"}]', Outcome.MODEL_SERVER_ERROR, ""),
        (b'{"object":"list","data":[{"embedding":[0.5]}],"error":null}', Outcome.OK_WITHOUT_USAGE, None),
        (b'{"code":0,"message":"success","results":[]}', Outcome.OK_WITHOUT_USAGE, None),
        (b"[[0.5]]", Outcome.OK_WITHOUT_USAGE, None),
        (b"\xff\xfb audio", Outcome.OK_WITHOUT_USAGE, None),
        (b"", Outcome.OK_WITHOUT_USAGE, None),
        (b'{"data":"' + b"x" * MAX_ERROR_BYTES + b'","error":"x"}', Outcome.OK_WITHOUT_USAGE, None),
    ],
)
def test_a_result_may_be_of_any_kind_but_is_no_error(
    path: str, raw: bytes, outcome: Outcome, kind: str | None
) -> None:
    observer = make_observer(
        200,
        [],
        expected_reply(None, path),
        on_response=lambda id: None,
        strip_usage=False,
        held=HeldBytes(0),
    )
    assert observer.feed(raw[:5], 1.0) + observer.feed(raw[5:], 1.0) + observer.finish(1.0) == raw
    if path not in VECTOR_APIS and outcome is Outcome.OK_WITHOUT_USAGE:
        outcome = Outcome.OK
    assert classify_outcome(TransportResult.COMPLETE, 200, observer.seen, path) is outcome
    assert (observer.seen.error, observer.seen.unread) == (kind, "")


@pytest.mark.parametrize(
    ("raw", "outcome", "kind"),
    [
        (b'{"error":{"message":"x","type":"server_error"}}', Outcome.MODEL_SERVER_ERROR, "server_error"),
        (b'{"object":"error","message":"x","type":"E"}', Outcome.MODEL_SERVER_ERROR, "E"),
        (b'{"choices":[{"message":{"content":"whole"}}]}', Outcome.CONTENT_ERROR, None),
        (b"<html>", Outcome.CONTENT_ERROR, None),
    ],
)
def test_an_error_in_the_place_of_a_stream_is_the_servers(
    raw: bytes, outcome: Outcome, kind: str | None
) -> None:
    observer = make_observer(
        200,
        [(b"content-type", b"application/json")],
        "stream",
        on_response=lambda id: None,
        strip_usage=False,
        held=HeldBytes(),
    )
    assert observer.feed(raw, 1.0) + observer.finish(1.0) == raw
    assert classify_outcome(TransportResult.COMPLETE, 200, observer.seen, PATH) is outcome
    assert observer.seen.error == kind
