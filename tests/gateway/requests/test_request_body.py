"""What is read in a request, and what is changed in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.gateway.requests.one_meaning import check_meaning
from penstock.gateway.requests.request_body import read_request, response_of
from penstock.gateway.requests.sessions import session_named
from penstock.generation.request.body_decoder import BodyDecoder
from penstock.generation.request.schemas import GenerateRequest
from penstock.http.errors import ApiError


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "chat", "prompt": "p", **fields}).encode()


def test_what_is_read() -> None:
    read = read_request(body(stream=True, priority=-3, stream_options={"include_usage": False}))
    assert (read.model, read.stream, read.priority) == ("chat", True, -3)
    assert (read.include_usage, read.prompt) == (False, b'"p"')


@pytest.mark.parametrize(
    ("fields", "stream", "most"),
    [
        ({}, True, None),
        ({"stream": False, "options": {"num_predict": 12}}, False, 12),
        ({"options": {"num_predict": -1}}, True, None),
        ({"options": {"num_predict": 0}}, True, None),
        ({"options": "x"}, True, None),
    ],
)
def test_ollamas_bodies(fields: dict[str, Any], stream: bool, most: int | None) -> None:
    read = read_request(body(**fields), "/api/generate")
    assert (read.stream, read.most_output) == (stream, most)


SERVER = BodyDecoder(GenerateRequest, strict=False)
"""What reads a server's requests."""


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"{",
        b"[]",
        b'{"model": 1}',
        b'{"priority": "high"}',
        b'{"stream": "x"}',
        b'{"stream": 2}',
        b'{"stream_options": []}',
        b'{"stream_options": {"include_usage": "x"}}',
        b"\xff{}",
        b"\xef\xbb\xbf{}",
        b'{"a": NaN}',
        b"[" * 100_000,
        b'{"model": "m" "n"}',
        b'{"model": "\\ud800"}',
    ],
)
def test_what_cannot_be_read_has_the_servers_error(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_request(raw)
    with pytest.raises(ApiError) as servers:
        SERVER.decode(raw)
    assert caught.value.body() == servers.value.body()
    assert caught.value.status == 400


@pytest.mark.parametrize("value", ["1", "0", '"true"', '"1"', "null", "true"])
def test_what_a_server_takes_as_true_is_true(value: str) -> None:
    raw = b'{"model":null,"priority":"5","stream":%b}' % value.encode()
    read, servers = read_request(raw), SERVER.decode(raw)
    assert read.stream is bool(servers.stream)
    assert (read.model, read.priority) == ("", servers.priority)


def test_a_byte_order_mark_is_named() -> None:
    for size in (0, 1 << 20):
        with pytest.raises(ApiError, match="byte order mark"):
            read_request(b"\xef\xbb\xbf{}" + b" " * size)


def test_usage_is_asked_for_without_touching_the_rest() -> None:
    read = read_request(b'{"model":"m","stream":true,"big":12345678901234567890,"stream_options":{"x":1}}')
    assert read.with_usage() == (
        b'{"model":"m","stream":true,"big":12345678901234567890,"stream_options":{"x":1,"include_usage":true}}'
    )


@pytest.mark.parametrize(
    "raw",
    [
        b' {"stream":true}\r\n',
        b'{"stream": true, "prompt": "\\"stream_options\\""}',
        b'{"stream":true,"stream_options":null}',
        b'{"stream":true,"\\u0073tream_options":{"include_usage":false}}',
        b'{"stream":true,"stream_option\\u0073":null}',
    ],
)
def test_usage_is_asked_for_once(raw: bytes) -> None:
    given = json.loads(raw)
    with_usage = read_request(raw).with_usage()
    assert json.loads(with_usage) == {**given, "stream_options": {"include_usage": True}}
    check_meaning(with_usage)


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({}, None),
        ({"prompt_cache_key": "c"}, "c"),
        ({"prompt_cache_key": "c", "session_id": "s"}, "s"),
        ({"metadata": {"user_id": '{"session_id":"s"}'}}, '{"session_id":"s"}'),
        ({"prompt_cache_key": "c", "metadata": {"user_id": "u"}}, "c"),
        ({"prompt_cache_key": "", "metadata": {"trace": 1}}, None),
        ({"prompt_cache_key": 5}, None),
        ({"metadata": [1]}, None),
        ({"metadata": {"user_id": 7}}, None),
    ],
)
def test_what_names_a_session(fields: dict[str, Any], session: str | None) -> None:
    assert read_request(body(**fields)).session == session


@pytest.mark.parametrize(
    ("first", "name", "session"),
    [
        ({b"session-id": b"c"}, b"x-session-id", "c"),
        ({b"x-claude-code-session-id": b"d"}, b"x-session-id", "d"),
        ({b"session-id": b"c", b"x-session-id": b"s"}, b"x-session-id", "s"),
        ({b"x-session-id": b"s"}, b"x-other", None),
    ],
)
def test_headers_that_name_a_session(first: dict[bytes, bytes], name: bytes, session: str | None) -> None:
    assert session_named(first, name) == session


def test_instructions_are_the_beginning_of_the_prompt() -> None:
    """Equal conversations after other instructions are other prompts."""
    for field, conversation in (("instructions", "input"), ("system", "messages")):
        prompts = [
            read_request(json.dumps({"model": "m", field: text, conversation: ["x"]}).encode()).prompt
            for text in ("a", "b")
        ]
        assert [prompt[:3] for prompt in prompts] == [b'"a"', b'"b"']
        assert prompts[0][3:] == prompts[1][3:] == b'["x"]'


DIGITS = "0123456789ab" * 3


@pytest.mark.parametrize(
    ("fields", "response"),
    [
        ({}, None),
        ({"previous_response_id": None}, None),
        ({"previous_response_id": "resp_1"}, "resp_1"),
        ({"previous_response_id": ""}, None),
        ({"previous_response_id": 5}, None),
        ({"previous_response_id": "x" * 257}, None),
        ({"input": [{"type": "item_reference", "id": f"msg_{DIGITS}0003"}]}, f"resp_{DIGITS}"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, None),
        ({"input": [{"type": "message", "id": f"msg_{DIGITS}0003"}]}, None),
        ({"input": [{"type": "message", "content": "item_reference"}]}, None),
        ({"input": [5, "item_reference"]}, None),
    ],
)
def test_a_response_that_is_continued(fields: dict[str, Any], response: str | None) -> None:
    read = read_request(body(**fields))
    assert response_of("/v1/responses", read) == response
    assert response_of("/v1/chat/completions", read) is None


@pytest.mark.parametrize(
    ("path", "response"),
    [
        ("/v1/responses/resp_1", "resp_1"),
        ("/v1/responses/resp_1/cancel", "resp_1"),
        ("/v1/responses/resp_1/input_items", "resp_1"),
        ("/v1/responses/input_tokens", None),
        ("/v1/responses/compact", None),
        ("/v1/responses/", None),
        ("/v1/responses", None),
        ("/v1/messages/resp_1", None),
        (f"/v1/responses/{'x' * 257}", None),
    ],
)
def test_a_response_that_a_path_names(path: str, response: str | None) -> None:
    assert response_of(path, None) == response
