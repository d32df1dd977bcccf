"""Spells a request's messages as its chat template reads them: dictionaries."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.generation.parsers.call_writing import json_text
from penstock.generation.parsers.custom_input import CUSTOM_INPUT
from penstock.generation.prompt.template_rules import (
    CALLS,
    EMPTY_SCHEMA,
    FUNCTION_FIELDS,
    PARAMETER_DESCRIPTIONS,
    PROPERTIES,
    THINKING_PART,
    CallIds,
    PlainMessage,
    TemplateRules,
)
from penstock.generation.request.body_decoder import check_parts
from penstock.generation.request.schemas import Message, Part, Tool, ToolCall
from penstock.generation.request.unsupported_content import is_image
from penstock.http.errors import ApiError

_SHORT_ID = 9

_decode = msgspec.json.Decoder().decode


_PLACE = f"\ue000{secrets.token_hex(8)}\ue002"
"""Marks a function's name whose call text is to stand before."""


def conversation(
    messages: Sequence[Message],
    rules: TemplateRules,
    before_calls: list[str] | None = None,
    known: Sequence[PlainMessage] = (),
) -> list[PlainMessage]:
    """``messages`` as dictionaries; ``known``: the first of them, as they were made before. Texts beside
    calls that the template does not show are appended to ``before_calls``, for :func:`put_before_calls`.
    Raises ApiError for parts that are not text, and what else a message cannot have."""
    fresh = enumerate(messages[len(known) :], len(known)) if known else enumerate(messages)
    plain = [*known]
    plain += [_message(message, f"messages[{number}]", rules) for number, message in fresh]
    if any(message.tool_calls for message in messages):
        _join_results(messages, plain, rules)
    if rules.before_calls is not None and before_calls is not None:
        for message in plain:
            if message.get("tool_calls"):
                _mark_call(message, before_calls, rules)
    return plain


def put_before_calls(prompt: str, texts: list[str], rules: TemplateRules) -> str:
    """The prompt with each text before the calls of its message."""
    if not texts or rules.before_calls is None:
        return prompt
    lead, start = rules.before_calls
    place = re.compile(f"({re.escape(start)})?{_PLACE}([0-9]+);")
    # A template may show the name elsewhere as well.
    return place.sub(lambda found: f"{lead}{texts[int(found[2])]}{start}" if found[1] else "", prompt)


def _mark_call(message: PlainMessage, texts: list[str], rules: TemplateRules) -> None:
    content = message.get("content")
    said = content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())
    if said:
        function = message["tool_calls"][0]["function"]
        function["name"] = f"{_PLACE}{len(texts)};{function['name']}"
        texts.append(said)
        message["content"] = rules.absent[0]
        if message["content"] is UNSET:
            del message["content"]


def plain_tools(tools: list[Tool], rules: TemplateRules) -> list[dict[str, Any]]:
    """The tools as templates read them."""
    plain: list[dict[str, Any]] = msgspec.to_builtins(tools)
    if rules.function_fields:
        for tool in plain:
            _fill(tool["function"], rules.function_fields)
    return plain


def _fill(function: dict[str, Any], needed: tuple[str, ...]) -> None:
    for name, value in FUNCTION_FIELDS.items():
        if name in needed:
            function.setdefault(name, value)
    parameters = function.get("parameters")
    if parameters == {} and EMPTY_SCHEMA in needed:
        function["parameters"] = FUNCTION_FIELDS["parameters"]
    elif parameters is not None and PROPERTIES in needed:
        parameters.setdefault("properties", {})
    if PARAMETER_DESCRIPTIONS in needed and isinstance(parameters, dict):
        for schema in (parameters.get("properties") or {}).values():
            if isinstance(schema, dict):
                schema.setdefault("description", "")


def kind_of(message: Message) -> str:
    """The kind of a message, as :class:`TemplateRules` has them."""
    return CALLS if message.tool_calls else message.role


def contents_of(message: Message, field: str = "messages") -> list[str | Part]:
    """The texts of a message's content, and the parts that stand for pictures. ``field``: the path of the
    message. Raises ApiError."""
    content = message.refusal if message.content is None else message.content
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    contents = (
        part if is_image(part) else _text(part, f"{field}.content[{place}]")
        for place, part in enumerate(content)
    )
    return [each for each in contents if each is not None]


def message_text(message: Message, field: str = "messages") -> str:
    """The text of a message, its parts joined by line breaks, without pictures. Raises ApiError."""
    return "\n".join(each for each in contents_of(message, field) if isinstance(each, str))


def reasoning_of(message: Message) -> str | None:
    """The reasoning of a message, under whatever name it has come; None: it has none."""
    for named in (message.reasoning_content, message.reasoning, message.thinking, message.thought):
        if named is not None:
            return named
    if not isinstance(message.content, list):
        return None
    thoughts = [part.thought() for part in message.content if isinstance(part, Part)]
    return "\n".join(filter(None, thoughts)) or None


def arguments_of(call: ToolCall, field: str) -> tuple[str, dict[str, Any] | str]:
    """Name and arguments of a call; a custom tool is a function to the model. ``field``: the path of the
    call. Arguments are a text if that is no JSON object. Raises ApiError."""
    if call.custom is not None:
        return call.custom.name, {CUSTOM_INPUT: call.custom.input}
    if call.function is None:
        raise ApiError(400, f"{field}.function is missing.", param=f"{field}.function")
    given = call.function.arguments
    if isinstance(given, str):
        return call.function.name, _arguments(given, f"{field}.function.arguments")
    return call.function.name, given or {}


def _message(message: Message, field: str, rules: TemplateRules) -> PlainMessage:
    if message.function_call or message.audio:
        param = f"{field}.{'function_call' if message.function_call else 'audio'}"
        raise ApiError(
            400, f"{param} is not supported; calls are sent as tool_calls, text as content.", param=param
        )
    plain: PlainMessage = {"role": message.role}
    content: Any = message.content
    if type(content) is not str or message.tool_calls or message.role not in rules.as_text:
        content = _content(message, contents_of(message, field), rules)
    cut = rules.cut_at and message.role == "assistant"
    if cut and (rules.cut_beside_reasoning or not reasoning_of(message)):
        content = _uncut(content, rules)
    if content is not UNSET:
        plain["content"] = content
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls[{place}]", rules)
            for place, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = _id(message.tool_call_id, rules.ids)
    if message.role == "assistant":
        reasoning = reasoning_of(message)
        if reasoning is not None:
            think(plain, reasoning, rules)
    return plain


def _uncut(content: Any, rules: TemplateRules) -> Any:
    """Content at whose marks no template cuts it."""
    if isinstance(content, list):
        return [part | {"text": _uncut(part["text"], rules)} for part in content]
    if isinstance(content, str):
        for opening, closing in rules.cut_at:
            content = _apart(content, opening, closing)
    return content


def _apart(text: str, opening: str, closing: str) -> str:
    """The text with a space within each mark, but for those of reasoning at the start."""
    head = ""
    if text.lstrip().startswith(opening):
        last = closing if closing in text else opening
        head, _, text = text.partition(last)
        head += last
    for mark in (opening, closing):
        text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    return head + text


def think(message: PlainMessage, text: str, rules: TemplateRules) -> None:
    """Give a message reasoning."""
    if rules.reasoning != (THINKING_PART,):
        message |= dict.fromkeys(rules.reasoning, text)
        return
    content = message.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    message["content"] = [{"type": "thinking", "thinking": text}, *parts]


def _content(message: Message, contents: list[str | Part], rules: TemplateRules) -> Any:
    """Content as the client has it where the template takes that: as text, as parts, or as neither."""
    kind = kind_of(message)
    texts = [each if isinstance(each, str) else rules.image_text for each in contents]
    if kind in rules.pictures and any(map(is_image, contents)):
        return [
            {"type": "text", "text": each} if isinstance(each, str) else {"type": "image"}
            for each in contents
        ]
    if kind == CALLS and not any(texts):
        return _absent(message, rules)
    if kind in rules.as_part:
        return [{"type": "text", "text": "\n".join(texts)}]
    if kind in rules.as_parts and (kind not in rules.as_text or isinstance(message.content, list)):
        return [{"type": "text", "text": text} for text in texts or [""]]
    return "\n".join(texts)


def _absent(message: Message, rules: TemplateRules) -> Any:
    """No content beside calls: as the client has it, or else as the template takes it."""
    given = message.content
    if given == "" and "" in rules.absent:
        return ""
    return rules.absent[0]


def _text(part: str | Part, where: str) -> str | None:
    """The text of a part; None for reasoning."""
    if isinstance(part, str):
        return part
    if part.thought() is not None:
        return None
    if part.type not in ("text", "refusal"):
        raise ApiError(
            400,
            f"{where}: parts of type {part.type[:60]!r} are not supported, only text, refusal and thinking.",
            param=where,
        )
    text = part.value()
    if text is None:
        raise ApiError(
            400, f"{where}: a part of type {part.type!r} needs the field {part.type!r}.", param=where
        )
    return text


# -- calls


def _tool_call(call: ToolCall, field: str, rules: TemplateRules) -> dict[str, Any]:
    name, arguments = arguments_of(call, field)
    if not rules.object_arguments:
        arguments = _argument_text(call, arguments)
    elif isinstance(arguments, str) and not rules.text_arguments:
        arguments = {"arguments": arguments}
    plain: dict[str, Any] = {"type": "function"}
    if call.id is not None:
        plain["id"] = _id(call.id, rules.ids)
    plain["function"] = {"name": name, "arguments": arguments}
    return plain


def _argument_text(call: ToolCall, arguments: dict[str, Any] | str) -> str:
    """The text that the model wrote, if it has been kept."""
    given = None if call.function is None else call.function.arguments
    if isinstance(given, str) and given.strip():
        return given
    return arguments if isinstance(arguments, str) else json_text(arguments)


def _arguments(text: str, field: str) -> dict[str, Any] | str:
    """The JSON object that OpenAI's clients send as ``text`` and templates expect; ``text`` if it is none.

    A history has what models wrote, cut short by max_tokens for instance. The model sees its own text and
    can correct it; an error would make the history useless forever.
    """
    if not text.strip():
        return {}
    encoded = text.encode()
    check_parts(encoded, field, field)
    try:
        arguments = _decode(encoded)
    except (msgspec.MsgspecError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _id(id: str, ids: CallIds) -> str:
    """The id of a call; a short one where the template wants that."""
    if ids is not CallIds.SHORT or len(id) == _SHORT_ID:
        return id
    return blake2b(id.encode(), digest_size=_SHORT_ID).hexdigest()[:_SHORT_ID]


def _join_results(messages: Sequence[Message], plain: list[PlainMessage], rules: TemplateRules) -> None:
    """Give each result the name of the called function: some templates show it, and few clients send it.
    Where ids are to have the name, calls and their results get such ids."""
    calls: dict[str, tuple[str, str]] = {}
    number = 0
    for message, spelled in zip(messages, plain, strict=True):
        for call, shown in zip(message.tool_calls or (), spelled.get("tool_calls", ()), strict=True):
            name = shown["function"]["name"]
            if rules.ids is CallIds.NAMED:
                shown["id"] = _named_id(call.id, name, number)
            if call.id is not None:
                calls[call.id] = name, shown["id"]
            number += 1
        if message.role == "tool" and message.tool_call_id in calls:
            name, spelled["tool_call_id"] = calls[message.tool_call_id]
            spelled.setdefault("name", name)


def _named_id(id: str | None, name: str, number: int) -> str:
    """The id of a conversation's call of that number, counted from 0; ``id`` if it has the form."""
    head, found, digits = (id or "").rpartition(":")
    named = found and head == f"functions.{name}" and digits.isascii() and digits.isdigit()
    return id if named and id else f"functions.{name}:{number}"
