"""The arguments' JSON where a model writes them as text: the functions' schemas say what is a string."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from penstock.generation.parsers.escapes import without_halves

MAX_LITERAL = 16_384
"""Maximum characters of a list or dictionary in Python's syntax, which is read at once."""
MAX_REFERENCES = 16
"""Maximum references that lead from a parameter to its type."""


class ValueType(Enum):
    """How the text of an argument becomes JSON."""

    STRING = auto()
    """The value is a string."""
    NULLABLE = auto()
    """The value is a string, unless it is ``null``."""
    JSON = auto()
    """The value is JSON; other text is a string."""
    NUMBER = auto()
    """The value is JSON, but for zeros before a number, which are dropped."""

    @property
    def is_text(self) -> bool:
        return self in (ValueType.STRING, ValueType.NULLABLE)


class Parameters:
    """The functions that may be called, and the schemas of their parameters."""

    def __init__(self, schemas: Mapping[str, dict[str, Any] | None]) -> None:
        """``schemas``: by the function's name; None: it takes any object. Empty: any function may be called,
        and nothing is known about it."""
        self._schemas = schemas

    def has(self, function: str) -> bool:
        """Whether the function may be called."""
        return not self._schemas or function in self._schemas

    def knows(self, function: str) -> bool:
        """Whether the function is one of the request's."""
        return function in self._schemas

    def meant(self, name: str) -> str:
        """The function that a name in a call means: some models put a namespace before it."""
        plain = name.removeprefix("functions.")
        return plain if plain in self._schemas and name not in self._schemas else name

    def called(self, id: str, prefix: str) -> str | None:
        """The function of an id ``PREFIX.NAME:NUMBER`` that a model wrote; None: it is no such id. If the
        separators are others, only a name that :meth:`has` can tell what of the id is the name."""
        if id in self._schemas:
            return id
        form = rf"(?:{re.escape(prefix)}[._]?)?{{}}[:_]?\s*\d*"
        named = [each for each in self._schemas if each in id]
        named = [each for each in named if re.fullmatch(form.format(re.escape(each)), id)]
        if named:
            return max(named, key=len)
        found = re.fullmatch(rf"(?:{re.escape(prefix)}\.)?([^\s:]+)\s*:\s*\d+", id)
        return found[1] if found else None

    def schema(self, function: str) -> Schema:
        """The schema of a function's arguments."""
        root = self._schemas.get(function)
        return Schema(root, root)

    def type_of(self, function: str, parameter: str, said: ValueType = ValueType.JSON) -> ValueType:
        """The type of a function's parameter; what the model ``said`` if the schema leaves it open."""
        return self.schema(function).field(parameter).type(said)


class Schema(NamedTuple):
    """What is known about a value."""

    schema: Any
    root: Any
    """Where its references lead."""

    @property
    def known(self) -> bool:
        return bool(_types(self.schema, self.root, MAX_REFERENCES))

    def holds(self, type: str) -> bool:
        """Whether the value may be of the JSON type, and may not be a string."""
        names = _types(self.schema, self.root, MAX_REFERENCES)
        return type in names and "string" not in names

    def type(self, said: ValueType = ValueType.JSON) -> ValueType:
        """How its text becomes JSON; as ``said`` if the schema leaves it open."""
        names = _types(self.schema, self.root, MAX_REFERENCES)
        if names == {"string"}:
            return ValueType.STRING
        if not names or ("string" in names and said is ValueType.STRING):
            return said
        if names == {"string", "null"}:
            return ValueType.NULLABLE
        return ValueType.NUMBER if names <= {"integer", "number"} else ValueType.JSON

    def field(self, name: str) -> Schema:
        """The schema of an object's field."""
        properties = self._part("properties")
        known = properties.get(name) if isinstance(properties, dict) else None
        return Schema(self._part("additionalProperties") if known is None else known, self.root)

    def item(self) -> Schema:
        """The schema of an array's items."""
        return Schema(self._part("items"), self.root)

    def _part(self, key: str) -> Any:
        """The keyword's value in the schema, or in the first of its alternatives that has it."""
        found = [self.schema]
        for _ in range(MAX_REFERENCES):
            if not found:
                break
            schema = found.pop(0)
            if isinstance(schema, dict):
                if key in schema:
                    return schema[key]
                found += [_target(schema["$ref"], self.root)] if "$ref" in schema else []
                found += [each for name in _CHOICES for each in _listed(schema.get(name))]
        return None


_CHOICES = ("anyOf", "oneOf", "allOf")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _target(reference: Any, root: Any) -> Any:
    """What a reference within the schema refers to; None: nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        root = root.get(step) if isinstance(root, dict) else None
    return root


def _types(schema: Any, root: Any, references: int) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and references:
        return _types(_target(reference, root), root, references - 1)
    named = schema.get("type")
    if named is not None:
        return {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {"null" if each is None else "string" if isinstance(each, str) else "json" for each in values}
    for key, type in (("properties", "object"), ("items", "array")):
        if key in schema:
            return {type}
    for key in _CHOICES:
        options = schema.get(key)
        if isinstance(options, list) and references:
            found = [_types(each, root, references - 1) for each in options]
            return set().union(*found) if all(found) or key == "allOf" else set()
    return set()


class ValueWriter:
    """Writes one argument's text as JSON, a string as it arrives."""

    def __init__(self, type: ValueType, emit: Callable[[str], object], *, lines: bool = False) -> None:
        """``lines``: a line break at its start and its end is not part of it."""
        self._type = type
        self._emit = emit
        self._lines = lines
        self._held: list[str] = []
        """Text whose meaning is open."""
        self._first = True
        """Whether nothing of the text has arrived."""
        self._quoted = False
        """Whether the string has begun."""

    def add(self, text: str) -> None:
        if self._first and self._lines and text:
            text = text.removeprefix("\n")
            self._first = False
        if not self._type.is_text:
            self._held.append(text)
            return
        text = self._take_held() + text
        if (
            self._type is ValueType.NULLABLE
            and not self._quoted
            and "null".startswith(text.removesuffix("\n"))
        ):
            self._held.append(text)
            return
        if self._lines and text.endswith("\n"):
            self._held.append("\n")
            text = text[:-1]
        self._string(text)

    def _take_held(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        return text

    @property
    def empty(self) -> bool:
        """Whether the text is white space so far, of which nothing was emitted."""
        return not self._quoted and not any(text.strip() for text in self._held)

    def end(self) -> None:
        """The whole text has arrived."""
        text = self._take_held()
        if self._lines:
            text = text.removesuffix("\n")
        if self._quoted:
            self._string(text)
            self._emit('"')
        else:
            self._emit(json_value(text, self._type))

    def cut(self) -> None:
        """The rest of the text does not arrive. JSON is sent as the model wrote it."""
        if not self._type.is_text:
            self._emit(self._take_held().strip())

    def _string(self, text: str) -> None:
        if not self._quoted:
            self._quoted = True
            self._emit('"')
        if text:
            self._emit(escaped(text))


def escaped(text: str) -> str:
    """``text`` within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


_ZEROS = re.compile(r"^(-?)0+(?=\d)")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def json_value(text: str, type: ValueType = ValueType.JSON) -> str:
    """The JSON of an argument's text."""
    plain = text.strip()
    plain = _PYTHON_WORDS.get(plain, plain)
    if type is ValueType.NUMBER:
        plain = _ZEROS.sub(r"\1", plain)
    if not type.is_text or (type is ValueType.NULLABLE and plain == "null"):
        try:
            json.loads(plain, parse_constant=_no_json)
        except (ValueError, RecursionError):
            if plain[:1] in ("[", "{", "(") and len(plain) <= MAX_LITERAL:
                return _python_container(plain) or json.dumps(text, ensure_ascii=False)
        else:
            return plain
    return json.dumps(text, ensure_ascii=False)


def _python_container(text: str) -> str:
    """The JSON of Python's lists, tuples, dictionaries and sets; empty for other text."""
    try:
        value = ast.literal_eval(text)
        return without_halves(json.dumps(value, ensure_ascii=False, allow_nan=False, default=list))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ""


def _no_json(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
