"""Spells calls as a model writes them: what its parser reads back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec

from penstock.generation.parsers.call_syntax import JsonCalls, PythonCalls, Section, TaggedCalls, XmlCalls
from penstock.generation.parsers.literals import MAX_DEPTH

Arguments = dict[str, Any] | str
"""The arguments of a call; a text if they are no JSON object."""
Calls = Sequence[tuple[str, Arguments]]
"""Name and arguments of each call."""


def write_calls(calls: Calls, section: Section | None, first: int = 0) -> str:
    """The calls of one message in a model's format. ``first``: how many calls the conversation has before.

    Where the format is not known or cannot express them, they are a list of objects with the keys ``name``
    and ``parameters``. Arguments that are no object stay as they are where the format is JSON.
    """
    match section:
        case JsonCalls():
            return _json_calls(calls, section, first)
        case PythonCalls() if section.quote or all(map(_has_words, calls)):
            return _python_calls(calls, section)
        case TaggedCalls(begun=False):
            numbered = zip(count(first), calls, strict=False)
            return _sections([_tagged(call, section, number) for number, call in numbered], section)
        case XmlCalls():
            return _sections([_xml(call, section) for call in calls], section)
    return json_text([{"name": name, "parameters": arguments} for name, arguments in calls])


def json_text(value: Any) -> str:
    """JSON on one line, with spaces after commas and colons, as models write it."""
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _object(arguments: Arguments) -> dict[str, Any]:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def _text(arguments: Arguments) -> str:
    return arguments if isinstance(arguments, str) else json_text(arguments)


def _sections(bodies: list[str], section: TaggedCalls | XmlCalls) -> str:
    """``bodies``: the calls without the text that precedes each."""
    opening = section.opens[0]
    if section.call not in ("", opening):
        separator = f"{section.separator} " if isinstance(section, TaggedCalls) and section.separator else ""
        return f"{opening}{separator.join(section.call + body for body in bodies)}{section.close}"
    close = "" if section.end == section.close else section.close
    return "".join(f"{opening}{body}{close}" for body in bodies)


def _json_calls(calls: Calls, section: JsonCalls, first: int) -> str:
    objects = []
    for number, (name, arguments) in enumerate(calls, first):
        id = f'"{section.id}": "{number}", ' if section.id else ""
        objects.append(f'{{{id}"{section.name}": {json_text(name)}, "{section.key}": {_text(arguments)}}}')
    if not section.opens:
        return "; ".join(objects)
    opening = section.opens[0]
    if section.listed:
        return f"{opening}[{', '.join(objects)}]{section.close}"
    return "\n".join(f"{opening}{each}{section.close}" for each in objects)


def _tagged(call: tuple[str, Arguments], section: TaggedCalls, number: int) -> str:
    name, arguments = call
    id = f"{section.prefix}.{name}:{number}" if section.prefix else name
    text = _text(arguments)
    if section.fence[0]:
        text = f"\n{section.fence[0]}\n{text}\n{section.fence[1]}"
    return f"{id}{section.before}{text}{section.end}"


def _xml(call: tuple[str, Arguments], section: XmlCalls) -> str:
    name, arguments = call
    written = [f"{_quoted(name, section.quote)}{section.call_end}"]
    around = "\n" if section.lines else ""
    for key, value in _object(arguments).items():
        kind = section.string if isinstance(value, str) else section.other
        text = value if isinstance(value, str) else json_text(value)
        marks = (section.raw[0], section.value_end, section.parameter, section.end)
        if section.raw[0] and any(mark in text for mark in marks):
            text = text.join(section.raw)
        written.append(
            f"{section.parameter}{_quoted(key, section.quote)}{kind}{section.parameter_end}"
            f"{section.value}{around}{text}{around}{section.value_end}"
        )
    return f"{around.join(written)}{around}{section.end}{section.after}"


def _quoted(name: str, quote: str) -> str:
    """A name in a tag."""
    return f"{quote}{name.replace('&', '&amp;').replace(quote, '&quot;')}{quote}" if quote else name


def _has_words(call: tuple[str, Arguments]) -> bool:
    """Whether the names of a call's parameters may stand in Python."""
    return all(key.isidentifier() for key in _object(call[1]))


def _python_calls(calls: Calls, section: PythonCalls) -> str:
    opening = section.opens[0] if section.opens else section.optional if section.close else ""
    given = [(name, _object(arguments)) for name, arguments in calls]
    if section.quote:
        head, close = opening + section.before[0], section.close
        return "".join(f"{head}{name}{_python(values, section.quote)}{close}" for name, values in given)
    texts = [", ".join(f"{key}={_python(value)}" for key, value in values.items()) for _, values in given]
    written = [f"{name}({text})" for (name, _), text in zip(given, texts, strict=True)]
    return f"{opening}[{', '.join(written)}]{section.close}"


def _python(value: Any, quote: str = "", depth: int = 0) -> str:
    """A literal of Python; with ``quote``, which delimits strings, one of JSON but for these, and names of
    fields without quotes."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}" if quote else json_text(value)
    if depth > MAX_DEPTH or not isinstance(value, dict | list):
        plain = json_text(value)
        return plain if quote else _PYTHON_WORDS.get(plain, plain)
    comma, colon = (",", ":") if quote else (", ", ": ")
    if isinstance(value, list):
        return f"[{comma.join(_python(each, quote, depth + 1) for each in value)}]"
    keys = [key if quote and key.isidentifier() else _python(key, quote) for key in value]
    values = [_python(each, quote, depth + 1) for each in value.values()]
    return f"{{{comma.join(map(colon.join, zip(keys, values, strict=True)))}}}"


_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}
