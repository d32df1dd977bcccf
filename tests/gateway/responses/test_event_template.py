"""Events that differ from the last one in their text alone are known without reading their JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.responses.event_template import MAX_MISSES, EventTemplate, are_texts
from penstock.gateway.responses.response_observer import Observation, StreamObserver


def completion(text: str, **more: object) -> dict[str, object]:
    return {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": None}], **more}


def chat(text: str) -> dict[str, object]:
    return {"id": "c", "choices": [{"delta": {"content": text}}]}


def reasoning(text: str) -> dict[str, object]:
    return {"choices": [{"delta": {"content": "", "reasoning_content": text}}]}


def messages(text: str) -> dict[str, object]:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


def responses(text: str) -> dict[str, object]:
    return {"type": "response.output_text.delta", "delta": text}


def numbered(text: str) -> dict[str, object]:
    """As Penstock and OpenAI number events: behind the text, or before it."""
    return {"type": "response.output_text.delta", "delta": text, "sequence_number": 7, "logprobs": []}


def numbered_first(text: str) -> dict[str, object]:
    return {"sequence_number": 7, "type": "response.output_text.delta", "item_id": "i", "delta": text}


DIALECTS: list[Callable[[str], dict[str, object]]] = [
    completion,
    chat,
    reasoning,
    messages,
    responses,
    numbered,
    numbered_first,
]


def event(data: object, *, ascii_only: bool = True) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=ascii_only).encode() + b"\n\n"


@pytest.fixture(params=DIALECTS, ids=lambda dialect: dialect.__name__)
def dialect(request: pytest.FixtureRequest) -> Callable[[str], dict[str, object]]:
    found: Callable[[str], dict[str, object]] = request.param
    return found


@pytest.mark.parametrize(
    "text", [" there", "x", "two\nlines", 'a "quote" \\ \t/', "größer", "漢字", '{"text": "']
)
def test_another_text(text: str, dialect: Callable[[str], dict[str, object]]) -> None:
    template = EventTemplate()
    template.learn(event(dialect("Hello")))
    assert template.matches(event(dialect(text), ascii_only=False))
    assert template.matches(event(dialect(text)))


@pytest.mark.parametrize(
    "raw",
    [
        event(completion("")),
        event(completion("x", id="d")),
        event(completion("x", usage={"prompt_tokens": 1, "completion_tokens": 1})),
        event({"choices": [{"text": "x", "finish_reason": "stop"}]}),
        event({"error": {"message": "x"}}),
        event(completion("x")) + event(completion("y")),
        event(completion("x"))[:-1],
        event(completion("x"))[1:],
        event(completion("@")).replace(b"@", b"\n"),
        event(completion("@")).replace(b"@", b"\\"),
        event(completion("@")).replace(b"@", b"\\x"),
        event(completion("@")).replace(b"@", b"\xff"),
        event(completion("\U0001f600")),  # surrogates are left to the JSON reader
        b"data: [DONE]\n\n",
        b"",
    ],
)
def test_anything_else_is_read(raw: bytes) -> None:
    template = EventTemplate()
    template.learn(event(completion("Hello")))
    assert not template.matches(raw)


@pytest.mark.parametrize("shape", [numbered, numbered_first])
@pytest.mark.parametrize("number", [0, 8, 10, 123456])
def test_another_number(shape: Callable[[str], dict[str, object]], number: int) -> None:
    template = EventTemplate()
    template.learn(event(shape("Hello")))
    for text in ("x", 'a "quote" ","sequence_number": 5', "größer"):
        assert template.matches(event({**shape(text), "sequence_number": number}))


@pytest.mark.parametrize("shape", [numbered, numbered_first])
@pytest.mark.parametrize("number", [b"", b"-1", b"1.5", b"1e3", b'"8"', b"8,8", b"08", b"8 ", "٨".encode()])
def test_a_number_is_digits(shape: Callable[[str], dict[str, object]], number: bytes) -> None:
    template = EventTemplate()
    template.learn(event(shape("Hello")))
    assert not template.matches(event(shape("x")).replace(b": 7", b": " + number))


def test_nothing_fits_before_there_was_an_event() -> None:
    assert not EventTemplate().matches(b"")
    assert not EventTemplate().matches(event(completion("x")))


def test_a_stream_whose_events_differ_is_not_compared_for_ever() -> None:
    template = EventTemplate()
    for number in range(MAX_MISSES):
        template.learn(event(completion("x", number=number)))
    assert template.matches(event(completion("y", number=MAX_MISSES - 1)))  # which makes it worth while
    for number in range(MAX_MISSES + 1):
        template.learn(event(completion("x", number=number)))
    assert not template.matches(event(completion("y", number=MAX_MISSES)))


def observed(chunks: list[bytes], *, strip_usage: bool) -> tuple[bytes, Observation]:
    observer = StreamObserver(strip_usage)
    out = b"".join(observer.feed(chunk, index / 8) for index, chunk in enumerate(chunks))
    return out + observer.finish(float(len(chunks))), observer.seen


texts = st.text(alphabet='ab"\\\n {}:é漢\0', max_size=4)
events = st.one_of(
    st.builds(
        lambda dialect, text, plain, number: event(dialect(text), ascii_only=plain).replace(
            b'number": 7', b'number": %d' % number
        ),
        st.sampled_from(DIALECTS),
        texts,
        st.booleans(),
        st.integers(0, 12),
    ),
    st.sampled_from(
        [
            event(completion("x", usage={"completion_tokens": 1})),
            event({"choices": [], "usage": {"completion_tokens": 2}}),
            event(completion("x")).replace(b"x", b"\xff"),
            event(completion("x")).replace(b"\n", b"\r\n"),
            event(completion("x")).replace(b"\n", b"\r"),
            event({"error": {"message": "broken"}}),
            b": comment\n\n",
            b"data: {\n\n",
            b"data: [DONE]\n\n",
        ]
    ),
)


@given(st.lists(events, max_size=12), st.lists(st.integers(0, 2000), max_size=6), st.booleans())
def test_it_changes_nothing_of_what_is_seen(stream: list[bytes], cuts: list[int], strip_usage: bool) -> None:
    """However events alternate and are cut: the same as when the JSON of each is read."""
    raw = b"".join(stream)
    at = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    cut = [raw[begin:end] for begin, end in itertools.pairwise(at)]
    for chunks in (stream, cut):
        with mock.patch.object(EventTemplate, "matches", return_value=False):
            expected = observed(chunks, strip_usage=strip_usage)
        assert observed(chunks, strip_usage=strip_usage) == expected


@pytest.mark.parametrize(
    ("texts", "plain"),
    [
        ([b"a", " größer".encode(), b'\\"', b"\\u00e9"], True),
        ([b"a", b"", b"b"], False),
        ([b"", b"a"], False),
        ([b"a", b""], False),
        ([b"a", b"\n", b"b"], False),
        ([b"a", b'"', b"b"], False),
        ([b"a", b"\\", b"n"], False),
        ([b"\xc3", b"\xa9"], False),
        ([b"\\ud83d"], False),
    ],
)
def test_many_texts_at_once(texts: list[bytes], plain: bool) -> None:
    assert are_texts(texts) is plain
