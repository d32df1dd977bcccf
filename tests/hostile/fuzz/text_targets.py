"""What parses request bodies, conversations, and the texts that models write."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec

from penstock.gateway.requests.request_body import read_request
from penstock.generation.parsers.calls import CallParser
from penstock.generation.parsers.delta import Delta, OutputParser
from penstock.generation.parsers.formats import TOOL_FORMATS
from penstock.generation.parsers.harmony import HarmonyParser
from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.parsers.named_call import NamedCallParser
from penstock.generation.parsers.reasoning import ReasoningParser
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.http.errors import ApiError
from tests.generation.planning import Planners, error_or_none, planners
from tests.hostile.fuzz.byte_source import ByteSource

# -- output parsers

_HERMES = partial(CallParser, TOOL_FORMATS["hermes"])
_LLAMA3 = partial(CallParser, TOOL_FORMATS["llama3_json"])
PARSERS: tuple[Callable[[], OutputParser], ...] = (
    _HERMES,
    _LLAMA3,
    *(partial(CallParser, each) for each in TOOL_FORMATS.values()),
    partial(HarmonyParser, ""),
    partial(ReasoningParser, "hi"),
    partial(ReasoningParser, "hi<think>\n"),
    partial(NamedCallParser, "f"),
)
FRAGMENTS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    '{"name": "f"',
    ', "arguments": ',
    '"parameters": ',
    '{"x": 1}',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ";",
    ",",
    ":",
    " ",
    "\n",
    "null",
    "é",
    "\u2028",
    '{"name": "g", "arguments": {"y": "}"}}',
    "<",
    "text",
    "\\u00e9",
    "\\ud800",
    "1e999",
)
"""Single bytes below their number stand for these, so that a fuzzer finds them at once."""


def output_text(data: bytes) -> str:
    """The text of ``data``, in which control bytes stand for FRAGMENTS."""
    text = data.decode(errors="replace")
    return "".join([FRAGMENTS[ord(each)] if ord(each) < len(FRAGMENTS) else each for each in text])


def _joined(parser: OutputParser, pieces: list[str], *, cut: bool) -> Delta:
    delta, idle = Delta(), False
    for piece in pieces:
        assert parser.idle or not idle, "a parser that was idle parses again"
        idle = parser.idle
        delta.add(parser.push(piece))
    delta.add(parser.finish(cut=cut))
    return delta


def _messages(format: MessageFormat, pieces: list[str]) -> Delta:
    parser = MessageParser(format, new_id=lambda: "id")
    delta = Delta()
    for piece in pieces:
        delta.add(parser.push(piece, last=False))
    delta.add(parser.push("", last=True))
    return delta


def output_parsers(data: bytes) -> None:
    """Whatever a model writes, no parser fails, and none depends on how the text is cut."""
    source = ByteSource(data)
    cut_at, text = source.take(12), output_text(source.rest())
    cuts = sorted(cut * 256 % (len(text) + 1) if cut > 200 else cut % (len(text) + 1) for cut in cut_at)
    edges = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    for make, cut in itertools.product(PARSERS, (False, True)):
        whole = _joined(make(), [text], cut=cut)
        assert _joined(make(), pieces, cut=cut) == whole == _joined(make(), list(text), cut=cut)
        assert [call.index for call in whole.calls] == list(range(len(whole.calls)))
        assert all(call.name is not None for call in whole.calls)
    for tools in (_HERMES, _LLAMA3):
        format = MessageFormat(partial(ReasoningParser, ""), tools, one_call=bool(cut_at[:1] > b"\x80"))
        assert _messages(format, pieces) == _messages(format, [text])


# -- request bodies

HERMES = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif -%}
{%- for m in messages -%}
{%- if loop.first and m.role == 'system' %}{{ m.content | trim }}
{%- elif m.role == 'tool' %}<tool_response>{{ m.content }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>{% endif -%}
{%- else %}{{ m.role }}{{ (m.content or '').split('</think>')[-1].lstrip() }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}
{%- for k, v in call.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}assistant{% endif %}{% if enable_thinking %}<think>{% endif %}"""
PARTS = """
{%- set first = messages[0] %}{{ bos_token }}{{ strftime_now('%Y') }}
{%- for m in messages -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif -%}
{%- for part in m['content'] %}{{ part['text'] + '!' }}{% endfor %}{% endfor -%}
{%- for d in documents or [] %}{{ d.title.upper() }}{{ d['text'][:20] }}{% endfor -%}
{{- date_string.strip() if date_string else '' }}{{ custom | length if custom else '' }}"""


@cache
def _planners() -> tuple[Planners, ...]:
    tokens = {"bos_token": "<s>"}
    return (
        planners(),
        planners(template=ChatTemplate({"default": HERMES}, tokens)),
        planners(template=ChatTemplate({"default": PARTS}, tokens)),
    )


def _try_all(body: bytes) -> None:
    for made in _planners():
        for plan in (made.completion, made.chat, made.tokenize, made.detokenize):
            error = error_or_none(plan, body)
            if error is not None:
                assert 400 <= error.status < 500, error.body()
                assert msgspec.json.decode(error.body())["error"]["message"]


def bodies(data: bytes) -> None:
    """A request body is planned or refused with an error of its client, by every route and the gateway."""
    _try_all(data)
    try:
        request = read_request(data)
    except ApiError:
        return
    assert read_request(request.with_usage()).include_usage is True
    assert read_request(request.with_model("other").raw).model == "other"


_ODD: tuple[Any, ...] = (
    None,
    "",
    "x",
    "user",
    "assistant",
    "system",
    "tool",
    0,
    -1,
    1.5,
    10**30,
    True,
    [],
    {},
    [[]],
    {"": {}},
    "{}",
    "[1]",
    '{"a": {"b": [1, "}"]}}',
    "\u2028\ufeff\x00",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "</think>",
    "<|im_end|>",
    [{"type": "text", "text": "part"}],
    [{"type": "image_url"}],
    ["a", "b"],
    [None],
    {"name": "f", "arguments": {"x": 1}},
    {"__class__": 1, "items": 2},
    "𝕏" * 40,
)
_MESSAGE = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "refusal",
    "function_call",
    "surprise",
)
_FIELDS = (
    "tools",
    "documents",
    "chat_template_kwargs",
    "tool_choice",
    "add_generation_prompt",
    "echo",
    "continue_final_message",
    "reasoning_effort",
    "response_format",
    "parallel_tool_calls",
    "stream",
    "max_tokens",
)
_VARIABLES = ("custom", "date_string", "enable_thinking", "messages", "tools", "loop", "bos_token", "range")


def _odd(source: ByteSource) -> Any:
    kind = source.byte()
    if kind < 200:
        return _ODD[kind % len(_ODD)]
    if kind < 220:
        return source.text()
    return [_odd(source), _odd(source)] if kind < 235 else {source.text(8): _odd(source)}


def _message(source: ByteSource) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": source.pick(("user", "assistant", "system", "tool")),
        "content": source.text() if source.flag() else _odd(source),
    }
    if source.flag():
        arguments = source.text() if source.flag() else _odd(source)
        message["tool_calls"] = [{"function": {"name": source.text(8), "arguments": arguments}}]
    for _ in range(source.below(3)):
        message[source.pick(_MESSAGE)] = _odd(source)
    return message


def conversations(data: bytes) -> None:
    """Odd conversations with odd variables are rendered, or refused with an error of the client."""
    source = ByteSource(data)
    body: dict[str, Any] = {"messages": [_message(source) for _ in range(source.below(4))], "max_tokens": 4}
    for _ in range(source.below(4)):
        body[source.pick(_FIELDS)] = _odd(source)
    if source.flag():
        body["chat_template_kwargs"] = {source.pick(_VARIABLES): _odd(source) for _ in range(source.below(4))}
    if source.flag():
        parameters = {"name": source.text(6), "parameters": _odd(source)}
        body["tools"] = [{"type": "function", "function": parameters}]
    body["continue_final_message"] = source.byte() > 200
    _try_all(msgspec.json.encode(body))
