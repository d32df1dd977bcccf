"""Parses tool calls in the format of a model, and the calls that a grammar forces."""

from __future__ import annotations

import msgspec

from penstock.generation.parsers.call_syntax import SEPARATORS, JsonCalls, Section
from penstock.generation.parsers.delta import Delta
from penstock.generation.parsers.reader import MIN_MARKER, EndOfOutput, NotACall, Reader, ReadingParser, Steps
from penstock.generation.parsers.value_types import Parameters

NO_PARAMETERS = Parameters({})


class CallParser(ReadingParser):
    """Parses outputs whose calls are in sections of one kind; all else is content. White space before and
    between calls is dropped."""

    def __init__(self, section: Section, parameters: Parameters = NO_PARAMETERS) -> None:
        """``parameters``: of the functions that may be called."""
        self.guard = section.guard()
        super().__init__(lambda reader: _read(reader, section, parameters))

    def push(self, text: str) -> Delta:
        if self._reader.open is not None and self._passes(text):
            return Delta(content=text)
        return super().push(text)

    def _passes(self, text: str) -> bool:
        """Whether ``text`` is content, as the output is in content: see :attr:`guard`."""
        return not text[-1:].isspace() and not any(mark in text for mark in self.guard)


class RequiredCallsParser:
    """An output that the grammar of ``tool_choice`` forces to be calls: a call that is cut before its
    arguments begin is dropped, for nothing of such an output is content."""

    idle = False
    open = None
    guard = ""

    def __init__(self) -> None:
        self._parser = CallParser(JsonCalls())

    def push(self, text: str) -> Delta:
        return Delta(calls=self._parser.push(text).calls)

    def finish(self, *, cut: bool) -> Delta:
        return Delta(calls=self._parser.finish(cut=cut).calls)


def _read(reader: Reader, section: Section, parameters: Parameters) -> Steps[None]:
    """Read an output."""
    try:
        if not section.opens or section.begun:
            reader.begin()
            yield from _section(reader, section, parameters, opened=True)
        later = _marked(section)
        while True:
            yield from reader.content(later.opens)
            yield from _section(reader, later, parameters)
    except EndOfOutput:
        pass


def _marked(section: Section) -> Section:
    """The section where text precedes it, so that it has an opening."""
    if section.opens or not section.optional:
        return section
    return msgspec.structs.replace(section, opens=(section.optional,), optional="", around="")


def read_opening(reader: Reader, section: Section) -> Steps[None]:
    """Read what opens a section, which follows."""
    mark = yield from reader.either(*section.opens)
    if mark == section.call:
        reader.skip(-len(mark))


def _section(
    reader: Reader, section: Section, parameters: Parameters, *, opened: bool = False
) -> Steps[None]:
    """Read a section, and its opening unless it is ``opened``. Text that is no call is content."""
    before = reader.calls
    try:
        if not opened:
            yield from read_opening(reader, section)
        elif not section.opens:
            section = yield from _bare(reader, section, parameters)
        yield from section.read(reader, parameters)
        if (reader.calls == before or reader.supposing) and not section.begun:
            raise NotACall
        reader.settle()
    except NotACall:
        reader.give_up()
    except EndOfOutput:
        text = reader.undecided()
        refused = reader.refuse()
        if refused or not _ends_calls(text, reader, section, called=reader.calls > before):
            reader.delta.add_content(text)
        raise


def _bare(reader: Reader, section: Section, parameters: Parameters) -> Steps[Section]:
    """Read what opens a section that needs no opening; which one follows."""
    yield from reader.space()
    mark = yield from reader.either(section.optional, section.around)
    if mark and mark == section.optional:
        return _marked(section)
    if mark:
        yield from _text_around(reader, section)
    reader.suppose(parameters.has)
    return section


def _text_around(reader: Reader, section: Section) -> Steps[None]:
    """Read text up to the section's close, unless a call may follow."""
    if (yield from reader.space()) in "{[":
        return
    reader.settle()
    yield from reader.until(section.close, emit=lambda text: reader.delta.add_content(text))
    reader.begin()


def _ends_calls(text: str, reader: Reader, section: Section, *, called: bool) -> bool:
    """Whether ``text`` at an output's end is no content: the end of a section, or a call that is cut."""
    if reader.cut:
        tagged = len(text.lstrip()) >= MIN_MARKER and text.lstrip()[0] in "<["
        return called or bool(section.opens) or tagged or '"name"' in text
    rest = text.strip(f"{SEPARATORS}}}] \r\n\t")
    return called and (not rest or any(each.startswith(rest) for each in section.texts()))
