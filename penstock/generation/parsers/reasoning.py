"""Parses reasoning between markers at an output's start, such as ``<think>`` and ``</think>``."""

from __future__ import annotations

import msgspec

from penstock.generation.parsers.answer_tags import Tags
from penstock.generation.parsers.call_start import CallStart
from penstock.generation.parsers.delta import TextKind
from penstock.generation.parsers.reader import EndOfOutput, Reader, ReadingParser, Steps


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes its reasoning."""

    opens: tuple[str, ...] = ("<think>",)
    """Texts that open it; some templates put one at the end of the prompt."""
    label: str = ""
    """May follow the opening."""
    closes: tuple[str, ...] = ("</think>",)
    ends: tuple[str, ...] = ()
    """Openings of tool calls that end it, too."""
    tags: Tags = ()
    """What the model puts around its answer."""

    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens."""
        tags = [tag for pair in self.tags for tag in pair if tag]
        return (*self.opens, *self.closes, *self.ends, *tags)

    def is_open(self, prompt: str) -> bool:
        """Whether a text ends with what opens reasoning."""
        openings = [f"{each}{label}".rstrip() for each in self.opens for label in ("", self.label)]
        return prompt[-64:].rstrip().endswith(tuple(openings))

    def guard(self) -> str:
        """The characters with which what ends it, or a tag, begins."""
        return "".join(sorted({mark[0] for mark in self.markers()}))


THINK = Reasoning()


class ReasoningParser(ReadingParser):
    """Reasoning starts with the output, or with the end of the prompt; what follows is content, as is a call
    with which the model ends its reasoning."""

    def __init__(self, prompt: str, format: Reasoning = THINK, call: CallStart | None = None) -> None:
        """``prompt``: the text before the output. ``call``: how calls start; None: there are none."""
        self.guard = format.guard() + ("" if call is None else call.section.guard())
        inside = format.is_open(prompt)
        super().__init__(lambda reader: _read(reader, format, call, inside=inside))


def _read(reader: Reader, format: Reasoning, call: CallStart | None, *, inside: bool) -> Steps[None]:
    try:
        reader.begin()
        yield from reader.space()
        # Models open what the prompt has opened, and close what it has closed.
        mark = yield from reader.either(*format.opens, *(() if inside else format.closes))
        inside = inside or mark in format.opens
        if mark:
            reader.settle()
        else:
            reader.give_up()
        if inside and format.label:
            reader.begin()
            yield from reader.either(format.label)
            reader.settle()
        if inside:
            reader.turn()
            mark = yield from _reasoning(reader, format, call)
            reader.turn()
            reader.skip(len(mark))
            inside = False
        yield from reader.content(())
    except EndOfOutput:
        if inside:
            reader.delta.add_reasoning(reader.undecided())
        else:
            reader.delta.add_content(reader.undecided())


def _reasoning(reader: Reader, format: Reasoning, call: CallStart | None) -> Steps[str]:
    """Read reasoning. Returns the mark that closes it, which comes next; empty if a call does."""
    marks = (*format.closes, *format.ends, *(() if call is None else call.section.opens))

    def emit(text: str) -> None:
        reader.delta.add_reasoning(text)

    while True:
        mark = yield from reader.until(*marks, emit=emit, kind=TextKind.REASONING)
        reader.skip(-len(mark))
        if mark in format.closes:
            return mark
        if mark in format.ends:
            return ""
        assert call is not None, "it has the other marks"
        if (yield from call.follows(reader, mark, format.closes)):
            return ""
