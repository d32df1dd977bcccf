"""What is wrong with a body is said with the field, the value and what is allowed."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.routes.operations import AbortRequest
from penstock.dialects.chat.request_schema import ChatCompletionRequest
from penstock.dialects.completions.request_schema import CompletionRequest
from penstock.generation.request.body_decoder import MAX_UNKNOWN_NAMES, BodyDecoder
from penstock.generation.request.schemas import Message
from tests.generation.planning import error_of, error_or_none

completions = BodyDecoder(CompletionRequest, strict=False)
chats = BodyDecoder(ChatCompletionRequest, strict=False)

WRONG_TYPES = [
    (b'{"max_tokens": 1.5}', "max_tokens", "max_tokens: expected an integer or null, got 1.5."),
    (b'{"max_tokens": "x"}', "max_tokens", 'max_tokens: expected an integer or null, got "x".'),
    (b'{"stream": "maybe"}', "stream", 'stream: expected a boolean or null, got "maybe".'),
    (b'{"prompt": 5}', "prompt", "prompt: expected a string or a list or null, got 5."),
    (b'{"prompt": [1, [2, -3]]}', "prompt.1.1", "prompt[1][1]: expected an integer >= 0, got -3."),
    (b'{"stop": [5]}', "stop.0", "stop[0]: expected a string, got 5."),
    (b'{"stop": ["a","b","c","d","e"]}', "stop", "stop: expected a list of length <= 4"),
    (b'{"seed": 9223372036854775808}', "seed", "seed: expected an integer <= 9223372036854775807, got 922"),
    (b'{"temperature": 1e999}', "temperature", "temperature: number out of range, got 1e999."),
    (b'{"logit_bias": {"5": 1, "6": "q"}}', "logit_bias.6", 'logit_bias.6: expected a number, got "q".'),
    (b'{"logit_bias": {"a": 1}}', "logit_bias", "logit_bias: expected an integer as every key, got 'a'."),
    (b'{"stream_options": {"include_usage": []}}', "stream_options.include_usage", "got []."),
    (b'{"request_id": ""}', "request_id", "expected a string of length >= 1"),
]


@pytest.mark.parametrize(("body", "path", "message"), WRONG_TYPES)
def test_wrong_types(body: bytes, path: str, message: str) -> None:
    error = error_of(completions.decode, body)
    assert (error.status, error.type, error.param) == (400, "Bad Request", f"body.{path}")
    assert message in error.message


@pytest.mark.parametrize(
    ("body", "path", "message"),
    [
        (b"{}", "messages", "the request body: the required field 'messages' is missing."),
        (b'{"messages": [{"role": "a"}, {}]}', "messages.1.role", "messages[1]: the required field 'role'"),
        (b'{"messages": [{"role": "a", "content": [{}]}]}', "messages.0.content.0.type", "content[0]"),
        (b'{"messages": [{"role": "a", "content": 5}]}', "messages.0.content", "got 5."),
    ],
)
def test_wrong_messages(body: bytes, path: str, message: str) -> None:
    error = error_of(chats.decode, body)
    assert (error.status, error.param) == (400, f"body.{path}")
    assert message in error.message


# Python 3.14 bounds recursion by the stack alone, whose 8 MiB suffice to read to the end.
TOO_DEEP = "nested too deeply" if sys.version_info < (3, 14) else "Input data was truncated"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"", "body", "is empty"),
        (b" \n", "body", "is empty"),
        (b"[1, 2]", "body", "expected an object, got [1, 2]."),
        (b'"x"', "body", 'expected an object, got "x".'),
        (b"null", "body", "expected an object"),
        (b'{"prompt": ', "body.11", "Expecting value at position 11 (line 1, column 12)"),
        (b'{"prompt": "a"\n "n" 1}', "body.16", "(line 2, column 2)"),
        (b'{"prompt": "a"} x', "body.16", "Extra data"),
        (b'{"prompt": "\xff"}', "body", "not UTF-8: byte 12 is 0xff"),
        (b'{"prompt": "\\ud800"}', "body.prompt", "prompt: character 0 of the string is \\ud800, half of a"),
        (b'{"x": [{"y": "a\\udc01"}]}', "body.x[0].y", "x[0].y: character 1 of the string is \\udc01"),
        (b'{"x": {"\\ud800": 1}}', "body.x.\\ud800", "character 0 of the string is \\ud800"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "body.0", "byte order mark"),
        (b'{"prompt": ' + b"[" * 90_000, "body", TOO_DEEP),
        (b'{"x": ' + b'{"x":' * 45_000, "body", TOO_DEEP),
        (b'{"n": ' + b"9" * 5000 + b"}", "body.n", "out of range"),
        (b'{"x": ' + b" " * (1 << 20), "body", "not valid JSON"),
        (
            b'{"x": "' + b"y" * (1 << 20) + b'\\ud83d"}',
            "body",
            "Byte 1048583 of the request body is \\ud83d, half",
        ),
        (
            b'{"x": "' + b"y" * (1 << 20) + b'\\udc00"}',
            "body",
            "Byte 1048583 of the request body is \\udc00, half",
        ),
        (b'{"x": "\\ud83d\\ude00\\\\ud83d' + b"y" * (1 << 20), "body", "not valid JSON"),
    ],
)
def test_not_json(body: bytes, param: str, message: str) -> None:
    error = error_of(completions.decode, body)
    assert (error.status, error.type, error.param) == (400, "Bad Request", param)
    assert message in error.message


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_numbers_json_does_not_have_name_their_field(literal: str) -> None:
    error = error_of(completions.decode, b'{"logit_bias": {"7": %b}}' % literal.encode())
    assert (error.type, error.param) == ("BadRequestError", "logit_bias.7")
    assert error.message.startswith("logit_bias.7 must be a finite number, got ")


def test_a_long_value_is_cut() -> None:
    error = error_of(completions.decode, b'{"n": "%b"}' % (b"x" * 10_000))
    assert len(error.message) < 120
    assert "xxx…" in error.message


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        (b'{"max_tokens": "3"}', "max_tokens", 3),
        (b'{"max_tokens": 3.0}', "max_tokens", 3),
        (b'{"temperature": "0.5"}', "temperature", 0.5),
        (b'{"stream": "true"}', "stream", True),
        (b'{"stream": 0}', "stream", False),
        (b'{"prompt": "null"}', "prompt", "null"),
        (b'{"model": "12"}', "model", "12"),
    ],
)
def test_values_in_strings_are_taken_as_vllm_takes_them(body: bytes, field: str, value: Any) -> None:
    taken = getattr(completions.decode(body), field)
    assert taken == value
    assert type(taken) is type(value)


def test_unknown_fields_are_ignored_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    decoder = BodyDecoder(CompletionRequest, strict=False)
    with caplog.at_level(logging.WARNING):
        assert decoder.decode(b'{"prompt": "a", "zz": 1}').prompt == "a"
        decoder.decode(b'{"prompt": "a", "zz": 1, "yy": "\\n"}')
    assert decoder.unknown == {"zz": 2, "yy": 1}
    assert [record.getMessage().count("zz") for record in caplog.records] == [1, 0]


def test_unknown_names_are_bounded() -> None:
    decoder = BodyDecoder(CompletionRequest, strict=False)
    logging.disable(logging.WARNING)
    try:
        decoder.decode(b"{%b}" % b",".join(b'"f%d":1' % n for n in range(2 * MAX_UNKNOWN_NAMES)))
    finally:
        logging.disable(logging.NOTSET)
    assert len(decoder.unknown) == MAX_UNKNOWN_NAMES


def test_strict_servers_refuse_unknown_fields_with_the_nearest_name() -> None:
    decoder = BodyDecoder(CompletionRequest, strict=True)
    error = error_of(decoder.decode, b'{"prompt": "a", "tempreature": 1, "qqqq": 2}')
    assert (error.status, error.param) == (400, "tempreature")
    assert "Unknown fields 'tempreature' (did you mean 'temperature'?), 'qqqq'" in error.message
    assert decoder.decode(b'{"prompt": "a", "max_tokens": "3"}').max_tokens == 3


NESTED = [
    (
        completions,
        b'{"stream_options": {"include_usag": true}}',
        "stream_options.include_usag",
        "include_usage",
    ),
    (
        completions,
        b'{"response_format": {"type": "json_object", "schema": {}}}',
        "response_format.schema",
        "",
    ),
    (
        completions,
        b'{"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": 1}, "stric": true}}}',
        "response_format.json_schema.stric",
        "strict",
    ),
    (chats, b'{"messages": [{"role": "a"}, {"role": "a", "nam": "b"}]}', "messages[1].nam", "name"),
    (
        chats,
        b'{"messages": [{"role": "a", "content": ["b", {"type": "text", "txt": "c"}]}]}',
        "messages[0].content[1].txt",
        "text",
    ),
    (
        chats,
        b'{"messages": [], "tools": [{"function": {"name": "f", "parameters": {}, "descripion": "d"}}]}',
        "tools[0].function.descripion",
        "description",
    ),
]


@pytest.mark.parametrize(("lax", "body", "path", "near"), NESTED)
def test_unknown_fields_of_nested_objects_are_as_those_of_the_body(
    lax: BodyDecoder[Any], body: bytes, path: str, near: str
) -> None:
    request = ChatCompletionRequest if lax is chats else CompletionRequest
    strict: BodyDecoder[Any] = BodyDecoder(request, strict=True)
    error = error_of(strict.decode, body)
    assert (error.status, error.param) == (400, path)
    assert path in error.message
    assert not near or f"(did you mean {near!r}?)" in error.message
    counting: BodyDecoder[Any] = BodyDecoder(request, strict=False)
    counting.decode(body)
    counting.decode(body)
    assert counting.unknown == {re.sub(r"\d+", "", path): 2}


def test_a_known_request_is_decoded_once() -> None:
    decoder = BodyDecoder(ChatCompletionRequest, strict=True)
    decoder._decode_again = None  # type: ignore[method-assign, assignment]
    call = b'{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}'
    decoded = decoder.decode(
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},'
        b'{"role": "assistant", "content": null, "annotations": [], "tool_calls": [%b]}],'
        b'"stream_options": {"include_usage": true}, "response_format": {"type": "text"},'
        b'"tools": [{"type": "function", "function": {"name": "f", "parameters": {"zz": 1}}}]}' % call
    )
    assert isinstance(decoded.messages[0], Message)
    assert decoded.tools is not None
    assert msgspec.json.encode(decoded.tools[0].function) == b'{"name":"f","parameters":{"zz":1}}'


@pytest.mark.parametrize("strict", [False, True])
def test_an_unknown_constraint_is_refused_with_those_that_are_known(strict: bool) -> None:
    decoder = BodyDecoder(CompletionRequest, strict=strict)
    error = error_of(decoder.decode, b'{"structured_outputs": {"jsn": {}}}')
    assert (error.status, error.param) == (400, "structured_outputs.jsn")
    assert "(did you mean 'json'?)" in error.message
    assert "json, json_object, regex, choice, grammar" in error.message


def test_a_closed_body_names_its_fields_whether_or_not_the_server_is_strict() -> None:
    decoder = BodyDecoder(AbortRequest, strict=False)
    error = error_of(decoder.decode, b'{"rids": ["a"]}')
    assert error.message == "Unknown field 'rids'; the body has request_ids, prefix, all."


@given(
    st.binary(max_size=200)
    | st.text(alphabet='{}[]":,0123456789.eE-+\\untrfalsprom ', max_size=60).map(str.encode)
)
def test_any_bytes_give_a_request_or_an_api_error(body: bytes) -> None:
    for decoder in (completions, chats):
        error = error_or_none(decoder.decode, body)
        assert error is None or (error.status == 400 and error.body())
