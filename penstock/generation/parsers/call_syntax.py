"""How models spell tool calls: as JSON objects, as a name with JSON arguments, as XML, as Python.

Each class reads one section of an output, whose opening was read. What it raises: NotACall at text that is
none of it, EndOfOutput at the output's end.
"""

from __future__ import annotations

import json
import re

import msgspec

from penstock.generation.parsers.literals import read_json_object, read_python
from penstock.generation.parsers.reader import MAX_NAME, EndOfOutput, NotACall, Reader, Steps
from penstock.generation.parsers.scanner import CallScanner
from penstock.generation.parsers.value_types import Parameters, ValueType, ValueWriter

SEPARATORS = ",;"
"""What may stand between calls, besides white space."""
SPECIAL = re.compile(r"｜DSML｜|<[|｜][^>]*[|｜]>|\[[A-Z_]+\]|</?[\w:]+>")
"""Texts that may be tokens."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an output that holds calls."""

    opens: tuple[str, ...] = ()
    """Texts that open it. None: an output that does not begin with a call is all content."""
    close: str = ""
    """Text that closes it, if the model writes one."""
    optional: str = ""
    """Text that may precede the first call of an output without ``opens``."""
    call: str = ""
    """Precedes each call; empty: a section is one call, or its calls are a list. One of ``opens`` too, if
    models omit the other one."""

    def read(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        raise NotImplementedError

    def guard(self) -> str:
        """The characters with which a section may begin."""
        return "".join(sorted({each[0] for each in self.opens}))

    def texts(self) -> list[str]:
        """All texts of the format."""
        fields = [getattr(self, name) for name in self.__struct_fields__]
        listed = [each for field in fields for each in (field if isinstance(field, tuple) else (field,))]
        return [text for text in listed if isinstance(text, str) and text]

    def markers(self) -> tuple[str, ...]:
        """Those that may be special tokens."""
        return tuple(special for text in self.texts() for special in SPECIAL.findall(text))

    def _closed(self, reader: Reader) -> Steps[bool]:
        """Read the end of the section, if this is it."""
        return bool(self.close) and bool((yield from reader.either(self.close)))


class JsonCalls(Section, frozen=True, kw_only=True):
    """``{"name": …, "arguments": {…}}``, one or several, or a list."""

    key: str = "arguments"
    """Under which the model writes the arguments; others are read, too."""
    listed: bool = False
    """Whether the model writes a list; other outputs are read, too."""

    def read(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        listed = (yield from reader.space()) == "["
        if listed:
            reader.skip(1)
        while True:
            yield from reader.space()
            yield from _json_call(reader, bare=not self.opens)
            while (char := (yield from reader.space())) != "{":
                if char == "]" and listed:
                    listed = False
                    reader.skip(1)
                elif char in SEPARATORS:
                    reader.skip(1)
                elif (yield from self._closed(reader)):
                    return
                else:
                    raise NotACall


def _json_call(reader: Reader, *, bare: bool) -> Steps[None]:
    """Read one object. ``bare``: only its fields show that it is a call, so it must have arguments."""
    scanner = CallScanner()
    while True:
        started = scanner.started
        reader.at = scanner.read(reader.text, reader.at)
        arguments = scanner.take_arguments()
        if scanner.done and scanner.name is not None and not scanner.started and not bare:
            started, arguments = False, "{}"
        elif (scanner.done or scanner.broken) and not scanner.started:
            raise NotACall
        if not started and (scanner.started or arguments):
            assert scanner.name is not None
            reader.start_call(scanner.name)
        if arguments:
            reader.arguments(arguments)
        if scanner.broken:
            raise NotACall
        if scanner.done:
            reader.begin()
            return
        yield from reader.more()


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
    or_json: bool = False
    """Whether the section may be JsonCalls instead."""
    content: str = ""
    """In place of a name, says that content follows."""

    def read(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        if self.or_json and (yield from reader.space()) in "[{":
            yield from JsonCalls(opens=self.opens, close=self.close).read(reader, parameters)
            return
        while True:
            yield from reader.space()
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
            yield from reader.closing(self.before)
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
            yield from read_json_object(reader)
        else:
            reader.start_call(name, id)
            reader.arguments("{}")
        yield from reader.closing(self.fence[1], self.end)

    def _name(self, reader: Reader, parameters: Parameters) -> Steps[tuple[str, str | None]]:
        """The name and the model's id."""
        if not self.prefix:
            name = yield from reader.name()
            if not self.opens and not parameters.has(name):
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
    """The same attribute of other parameters."""
    value: str = ""
    """Precedes the value."""
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
        name = yield from self._name(reader)
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
        try:
            mark = yield from reader.until(
                self.value_end,
                *(each for each in (self.parameter, self.end, self.close) if each),
                emit=writer.add,
            )
        except EndOfOutput:
            if reader.cut:
                writer.cut()
            else:
                writer.end()
            raise
        if mark != self.value_end:
            reader.skip(-len(mark))
        writer.end()


class PythonCalls(Section, frozen=True, kw_only=True):
    """``[f(a=1, b="x"), g()]``, or one call per line."""

    def read(self, reader: Reader, parameters: Parameters) -> Steps[None]:
        listed = (yield from reader.space()) == "["
        if listed:
            reader.skip(1)
        elif not self.opens:
            raise NotACall
        while True:
            char = yield from reader.space()
            if char == "]" and listed:
                reader.skip(1)
                if not self.close:
                    return
                listed = False
            elif char in SEPARATORS:
                reader.skip(1)
            elif (yield from self._closed(reader)):
                return
            else:
                yield from self._call(reader)

    def _call(self, reader: Reader) -> Steps[None]:
        name = yield from reader.name()
        yield from reader.expect("(")
        opening = "{"
        while (yield from reader.space()) != ")":
            if opening != "{":
                yield from reader.expect(",")
                if (yield from reader.space()) == ")":
                    break
            key = yield from reader.name()
            yield from reader.space()
            yield from reader.expect("=")
            if opening == "{":
                reader.start_call(name)
            reader.arguments(f"{opening}{json.dumps(key)}: ")
            opening = ", "
            yield from read_python(reader, reader.arguments)
        reader.skip(1)
        if opening == "{":
            reader.start_call(name)
        reader.arguments("{}" if opening == "{" else "}")
        reader.begin()
