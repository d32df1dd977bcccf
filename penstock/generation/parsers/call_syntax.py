"""How models spell tool calls: as JSON objects, as a name with JSON arguments, as XML, as Python.

Each class reads one section of an output, whose opening was read. What it raises: NotACall at text that is
none of it, EndOfOutput at the output's end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec

from penstock.generation.parsers.json_call import ARGUMENTS, NAMES, read_json_call
from penstock.generation.parsers.literals import MAX_DEPTH, closed, read_json_object, read_key, read_python
from penstock.generation.parsers.reader import MAX_NAME, EndOfOutput, NotACall, Reader, Steps
from penstock.generation.parsers.value_types import Parameters, Schema, ValueType, ValueWriter

SEPARATORS = ",;"
"""What may stand between calls, besides white space."""
SPECIAL = re.compile(r"｜DSML｜|\]<\]minimax\[>\[|<[|｜][^>]*[|｜]>|\[[A-Z_]+\]|</?[\w:]+>|<\|\w+>|<\w+\|>")
"""Texts that may be tokens."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an output that holds calls."""

    opens: tuple[str, ...] = ()
    """Texts that open it. None: calls may begin the output, and one must name a function of the request."""
    begun: bool = False
    """Whether the prompt has opened the first one. Its name must be one of a function then."""
    close: str = ""
    """Text that closes it, if the model writes one."""
    optional: str = ""
    """Text that opens a section of a format without ``opens``; the output's first calls may do without it."""
    around: str = ""
    """Text that may open a section of a format without ``opens``, and after which other text may stand before
    the calls."""
    call: str = ""
    """Precedes each call; empty: a section is one call, or its calls are a list. One of ``opens`` too, if
    models omit the other one."""

    def read(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        raise NotImplementedError

    def guard(self) -> str:
        """The characters with which a section may begin."""
        return "".join(sorted({each[0] for each in self.openings()}))

    def openings(self) -> tuple[str, ...]:
        """All texts that may open a section."""
        return self.opens or ((self.optional,) if self.optional else ())

    def texts(self) -> list[str]:
        """All texts of the format, but for JSON's keys."""
        fields = [getattr(self, name) for name in self.__struct_fields__]
        listed = [each for field in fields for each in (field if isinstance(field, tuple) else (field,))]
        return [text for text in listed if isinstance(text, str) and text and not text.isidentifier()]

    def markers(self) -> tuple[str, ...]:
        """Parts of its texts that may be special tokens."""
        return tuple(special for text in self.texts() for special in SPECIAL.findall(text))

    def _closed(self, reader: Reader) -> Steps[bool]:
        """Read the end of the section, if this is it."""
        return bool(self.close) and bool((yield from reader.either(self.close)))


class JsonCalls(Section, frozen=True, kw_only=True):
    """``{"name": …, "arguments": {…}}``, one or several, or a list."""

    name: str = "name"
    id: str = ""
    """Key of an id before the name."""
    key: str = "arguments"
    """Under which the model writes the arguments; those of other models (:data:`ARGUMENTS`) are read, too."""
    listed: bool = False
    """Whether the model writes a list; other outputs are read, too."""

    def __post_init__(self) -> None:
        if self.name not in NAMES or self.key not in ARGUMENTS:
            raise ValueError(f"json_call.NAMES or json_call.ARGUMENTS lacks {self.name!r} or {self.key!r}")

    def read(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        listed = (yield from reader.space()) == "["
        if listed:
            reader.skip(1)
        while True:
            yield from reader.space()
            yield from read_json_call(reader, parameters, bare=not self.opens)
            surplus = False
            while (char := (yield from reader.space())) != "{":
                if char == "]" and listed:
                    listed = False
                    reader.skip(1)
                    reader.begin()
                elif char == "}" and not surplus:
                    surplus = True
                    reader.skip(1)
                elif char in SEPARATORS:
                    reader.skip(1)
                elif (yield from self._closed(reader)):
                    return
                else:
                    raise NotACall


class TaggedCalls(Section, frozen=True, kw_only=True):
    """A name, a marker, and the arguments as JSON."""

    prefix: str = ""
    """The name is in an id ``PREFIX.NAME:NUMBER``; models vary the separators."""
    id: str = ""
    """Marker of an id after the name."""
    before: str = ""
    """Precedes the arguments."""
    fence: tuple[str, str] = ("", "")
    """Texts around the arguments, such as Markdown's."""
    end: str = ""
    """Follows the arguments."""
    separator: str = ""
    """Between calls; others are read, too."""
    or_json: bool = False
    """Whether the section may be JsonCalls instead."""
    content: str = ""
    """In place of a name, says that content follows."""

    def read(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        if self.or_json and (yield from reader.space()) in "[{":
            yield from JsonCalls(opens=self.opens, close=self.close).read(reader, parameters)
            return
        while True:
            while (yield from reader.space()) in SEPARATORS:
                reader.skip(1)
            if self.call and (yield from self._closed(reader)):
                return
            yield from reader.expect(self.call)
            yield from self._call(reader, parameters)
            if not self.call:
                return

    def _call(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        yield from reader.space()
        name, id = yield from self._name(reader, parameters)
        if name == self.content:
            yield from reader.either("\n")
            reader.settle()
            return
        marked = False
        for mark in (self.id, self.before, self.fence[0]):
            if mark:
                yield from reader.space()
                if (yield from reader.either(mark)):
                    marked = True
                    id = (yield from reader.name()) if mark == self.id else id
        if not (yield from self._empty(reader, marked=marked)):
            reader.start_call(name, id)
            yield from read_json_object(reader, self.end if self.end.startswith("<") else "")
        else:
            reader.start_call(name, id)
            reader.arguments("{}")
        if self.end != "}":
            yield from self._surplus(reader)
        yield from reader.closing(self.fence[1], self.end)

    def _surplus(self, reader: Reader) -> Steps[None]:
        """Read a brace too many, if one follows. Raises NotACall if it is not before the call's end."""
        reader.begin()
        if (yield from reader.space()) == "}":
            reader.skip(1)
            yield from reader.space()
            ends = (self.fence[1], self.end, self.close, self.call, *self.opens)
            mark = yield from reader.either(*ends)
            if not mark:
                raise NotACall
            reader.skip(-len(mark))

    def _name(self, reader: Reader, parameters: Parameters) -> Steps[tuple[str, str | None]]:
        """The name and the model's id."""
        if not self.prefix:
            name = parameters.meant((yield from reader.name()))
            if self.begun and name != self.content and not parameters.has(name):
                raise NotACall
            return name, None
        id = yield from reader.name()
        while (yield from reader.space()) not in "<{" and len(id) <= MAX_NAME:
            id += " " + (yield from reader.name())
        found = parameters.called(id, self.prefix)
        if found is None:
            raise NotACall
        return found, id

    def _empty(self, reader: Reader, *, marked: bool) -> Steps[bool]:
        """Whether the arguments are missing, or null. Raises NotACall if they are no object."""
        try:
            if (yield from reader.space()) == "{":
                return False
            if (yield from reader.either("null")):
                yield from reader.space()
            mark = yield from reader.either(*self.fence[1:], self.end, self.close, self.call, *self.opens)
        except EndOfOutput:
            if reader.cut or not marked:
                raise
            return True
        reader.skip(-len(mark))
        if not mark:
            raise NotACall
        return True


_QUOTED = re.compile(r"""\s*(["'])(.*?)\1(.*)""", re.DOTALL)


def _tag(head: str) -> tuple[str, str]:
    """The name in a tag, which may be quoted, and the attributes after it."""
    found = _QUOTED.fullmatch(head)
    if found is None:
        return head.strip(), ""
    return found[2].replace("&quot;", '"').replace("&amp;", "&"), found[3]


class XmlCalls(Section, frozen=True, kw_only=True):
    """Elements for the call and each parameter. The parameter's schema says whether its text is a string.

    Models leave out closing tags: whatever begins or ends something larger ends what is open.
    """

    call_end: str = ""
    """Ends the tag with the name; empty: the name ends where no name goes on."""
    quote: str = ""
    """Around names in tags; others are read, too."""
    parameter: str
    parameter_end: str
    """Ends the tag with the parameter's name."""
    string: str = ""
    """Attribute of a parameter that says that it is a string; without it, it is JSON."""
    other: str = ""
    """Attribute of a parameter that says that it is JSON and no string."""
    value: str = ""
    """Precedes the value."""
    raw: tuple[str, str] = ("", "")
    """Texts that may be around the value, in which nothing else ends it."""
    value_end: str
    end: str
    """Closes the call."""
    after: str = ""
    """May follow the call."""
    lines: bool = False
    """Whether a line break at the start and the end of a value is not part of it."""

    def read(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        while True:
            yield from reader.space()
            if self.call and (yield from self._closed(reader)):
                return
            yield from reader.expect(self.call)
            yield from self._call(reader, parameters)
            yield from reader.closing(self.after)
            if not self.call:
                return

    def _name(self, reader: Reader) -> Steps[str]:
        if not self.call_end:
            return (yield from reader.name())
        name, _ = _tag((yield from reader.line(self.call_end)))
        if not name or any(mark in name for mark in " \n<"):
            raise NotACall
        return name

    def _call(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        yield from reader.space()
        name = parameters.meant((yield from self._name(reader)))
        opening = ""
        try:
            while True:
                yield from reader.space()
                mark = yield from reader.either(
                    self.parameter, self.end, self.close, self.call, *self.opens, self.after
                )
                if not mark:
                    raise NotACall
                if not opening:
                    reader.start_call(name)
                    opening = "{"
                if mark != self.parameter:
                    break
                key, type = yield from self._key(reader, parameters, name)
                reader.settle()
                reader.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
                opening = ", "
                yield from self._value(reader, type)
                reader.begin()
        except (NotACall, EndOfOutput):
            if opening and not reader.cut:
                reader.arguments("{}" if opening == "{" else "}")
            raise
        reader.arguments("{}" if opening == "{" else "}")
        if mark != self.end:
            reader.skip(-len(mark))
        reader.begin()

    def _key(self, reader: Reader, parameters: Parameters, name: str) -> Steps[tuple[str, ValueType]]:
        key, attributes = _tag((yield from reader.line(self.parameter_end)))
        said = ValueType.STRING if self.string and self.string in attributes else ValueType.JSON
        if self.value:
            yield from reader.space()
            yield from reader.expect(self.value)
        return key, parameters.type_of(name, key, said)

    def _value(self, reader: Reader, type: ValueType) -> Steps[None]:
        writer = ValueWriter(type, reader.arguments, lines=self.lines)
        ends = [each for each in (self.value_end, self.parameter, self.end, self.close) if each]
        try:
            if (yield from reader.either(self.raw[0])):
                yield from reader.until(self.raw[1], emit=writer.add)
            mark = yield from reader.until(*ends, emit=writer.add)
            if mark in (self.end, self.close):
                mark = yield from self._end_of_value(reader, mark, writer)
        except EndOfOutput:
            if reader.cut:
                writer.cut()
            else:
                writer.end()
            raise
        if mark != self.value_end:
            reader.skip(-len(mark))
        writer.end()

    def _end_of_value(self, reader: Reader, mark: str, writer: ValueWriter) -> Steps[str]:
        """What ends a value in which the ``mark`` that ends the call or the section was read: it is text if
        the value's own end follows, rather than another call or the output's end."""
        reader.skip(-len(mark))
        reader.begin()
        reader.skip(len(mark))
        starts = [each for each in (*self.opens, self.call) if each]
        try:
            found = yield from reader.until(self.value_end, self.parameter, *starts, emit=len)
        except EndOfOutput:
            found = ""
        if not found or found in starts:
            reader.back()
            reader.skip(len(mark))
            return mark
        writer.add(reader.since_begin(less=len(found)))
        reader.settle()
        return found


class ElementCalls(Section, frozen=True, kw_only=True):
    """XML with a mark before each tag, whose parameters are elements named as they are. Elements within them
    are the fields of an object, or the items of an array if the schema says so."""

    mark: str
    item: str
    """The name of an array's items, where no schema tells that it is one."""

    def read(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        while True:
            yield from reader.space()
            if (yield from self._closed(reader)):
                return
            yield from reader.expect(self.call)
            name = parameters.meant(_tag((yield from reader.line(">")))[0])
            reader.start_call(name)
            yield from self._elements(reader, parameters.schema(name), array=False, depth=0)
            reader.begin()

    def _elements(
        self, reader: Reader, schema: Schema, *, array: bool, depth: int, first: str = ""
    ) -> Steps[None]:
        """Read elements up to the tag that closes them. ``first``: the name of the first one, whose tag was
        read."""
        emit, separator = reader.arguments, ""
        if depth > MAX_DEPTH:
            emit("null")
            raise NotACall
        emit("[" if array else "{")
        with closed(reader, emit, "]" if array else "}"):
            while True:
                name = first or (yield from self._next(reader))
                if name.startswith("/"):
                    return
                first = ""
                emit(separator if array else f"{separator}{json.dumps(name, ensure_ascii=False)}: ")
                separator = ", "
                yield from self._element(reader, name, schema.item() if array else schema.field(name), depth)

    def _next(self, reader: Reader, emit: Callable[[str], object] = len) -> Steps[str]:
        """The name in the next tag; what precedes it is emitted."""
        yield from reader.until(self.mark + "<", emit=emit)
        return (yield from reader.line(">")).strip()

    def _element(self, reader: Reader, name: str, schema: Schema, depth: int) -> Steps[None]:
        """Read the value of an element, and the tag that closes it."""
        writer = ValueWriter(schema.type(), reader.arguments)
        try:
            if schema.type() is ValueType.STRING:
                yield from reader.until(f"{self.mark}</{name}>", emit=writer.add)
                tag = "/"
            else:
                tag = yield from self._next(reader, writer.add)
        except (EndOfOutput, NotACall):
            writer.cut() if reader.cut else writer.end()
            raise
        if not tag.startswith("/"):
            array = schema.holds("array") or (not schema.known and tag == self.item)
            yield from self._elements(reader, schema, array=array, depth=depth + 1, first=tag)
        elif writer.empty and (schema.holds("array") or schema.holds("object")):
            reader.arguments("[]" if schema.holds("array") else "{}")
        else:
            writer.end()


class PythonCalls(Section, frozen=True, kw_only=True):
    """``[f(a=1, b="x"), g()]``, or one call per line; or ``call:f{a:1,b:QUOTExQUOTE}``."""

    before: tuple[str, ...] = ()
    """Texts of which one may precede each call."""
    quote: str = ""
    """Delimits strings, in which nothing is escaped. The arguments are in braces then."""

    def read(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        listed = (yield from reader.space()) == "["
        if listed:
            reader.skip(1)
        elif not self.opens:
            raise NotACall
        before = reader.calls
        while True:
            char = yield from reader.space()
            if char == "]" and listed:
                reader.skip(1)
                if not self.close:
                    return
                listed = False
                if reader.calls > before:
                    reader.begin()
            elif char in SEPARATORS:
                reader.skip(1)
            elif (yield from self._closed(reader)):
                return
            else:
                yield from self._call(reader, parameters)

    def _call(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        yield from reader.either(*self.before)
        name = parameters.meant((yield from reader.name()))
        bracket = yield from reader.either("(", "{" if self.quote else "")
        if not bracket and self.quote and (yield from reader.space()) and (yield from self._closed(reader)):
            reader.start_call(name)
            reader.arguments("{}")
            reader.begin()
            return
        if not bracket:
            raise NotACall
        opening, end = "{", ")" if bracket == "(" else "}"
        try:
            while (yield from reader.space()) != end:
                if opening != "{":
                    yield from reader.expect(",")
                    if (yield from reader.space()) == end:
                        break
                key = yield from self._key(reader)
                if opening == "{":
                    reader.start_call(name)
                reader.arguments(f"{opening}{key}: ")
                opening = ", "
                type = parameters.type_of(name, json.loads(key))
                yield from read_python(reader, reader.arguments, type, quote=self.quote)
            reader.skip(1)
        except (NotACall, EndOfOutput):
            if opening != "{" and not reader.cut:
                reader.arguments("}")
            raise
        if opening == "{":
            reader.start_call(name)
        reader.arguments("{}" if opening == "{" else "}")
        reader.begin()

    def _key(self, reader: Reader) -> Steps[str]:
        """The argument's name, as a JSON string, and what separates it from the value."""
        if self.quote:
            key, _ = yield from read_key(reader, self.quote)
            return key
        name = yield from reader.name()
        yield from reader.space()
        yield from reader.expect("=")
        return json.dumps(name)
