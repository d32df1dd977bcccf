"""Parses harmony, the format of gpt-oss: messages on the channels analysis, commentary and final.

A message is ``<|channel|>NAME to=RECIPIENT <|constrain|>json<|message|>TEXT`` and ends with ``<|end|>``, or
with ``<|call|>`` or ``<|return|>``, which end the output; ``<|start|>assistant`` precedes the next one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.generation.parsers.calls import NO_PARAMETERS
from penstock.generation.parsers.delta import TextKind
from penstock.generation.parsers.reader import EndOfOutput, NotACall, Reader, ReadingParser, Steps
from penstock.generation.parsers.value_types import Parameters

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CONSTRAIN = "<|constrain|>"
MESSAGE_ENDS = (END, "<|call|>", "<|return|>", START)
"""What ends a message, also of reasoning; a channel's name behind CHANNEL does, too."""
_ENDS = (*MESSAGE_ENDS, CHANNEL)
FINAL, COMMENTARY = "final", "commentary"
"""Channels of answers and of calls."""
_CHANNELS = ("analysis", COMMENTARY, FINAL)
GUARD = "<"
MARKERS = (*_ENDS, MESSAGE, CONSTRAIN)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
PREFIX = "functions."
"""Precedes a function's name; models leave it out at times."""
_NO_HEADER = FINAL


def in_channel(channel: str, text: str, reasoning: str = "") -> str:
    """An output after the template's ``<|start|>assistant``: ``reasoning``, if any, and a text. ``channel``:
    empty if the text has its own header."""
    header = f"{CHANNEL}{channel}{MESSAGE}" if channel else ""
    thought = f"{CHANNEL}analysis{MESSAGE}{reasoning}{END}{START}assistant" if reasoning else ""
    return f"{thought}{header}{text}"


def header_of(prompt: str) -> str:
    """The header of the message that begins at the end of ``prompt``; empty: none does."""
    return prompt.rpartition(START)[2] if prompt.endswith(MESSAGE) else ""


class HarmonyParser(ReadingParser):
    """Analysis is reasoning; commentary to a function is a call; other commentary and the final message are
    content. An output without channels is all content."""

    guard = GUARD

    def __init__(self, prompt: str, parameters: Parameters | None = NO_PARAMETERS) -> None:
        """``prompt``: the text before the output; it may hold a message's beginning. ``parameters``: of the
        functions that may be called; None: calls are not parsed but content."""
        header = header_of(prompt)
        super().__init__(lambda reader: _read(reader, header, parameters))


def _read(reader: Reader, header: str, parameters: Parameters | None) -> Steps[None]:
    between = False
    try:
        while True:
            if not header:
                header = yield from _header(reader)
            between = False
            yield from _message(reader, header, parameters)
            header, between = "", True
    except EndOfOutput:
        text = reader.undecided()
        if not (between and not text.strip()) and not (reader.cut and text.lstrip().startswith("<")):
            reader.delta.add_content(text)


def _header(reader: Reader) -> Steps[str]:
    """What precedes a message's text; that of a final message if there is none."""
    reader.begin()
    try:
        yield from reader.space()
        mark = yield from reader.either(START, CHANNEL, "to=")
        if not mark:
            raise NotACall
        header = yield from reader.line(MESSAGE)
    except NotACall:
        reader.give_up()
        return _NO_HEADER
    reader.settle()
    return mark + header


def _message(reader: Reader, header: str, parameters: Parameters | None) -> Steps[None]:
    """Read a message's text and end."""
    recipient = _RECIPIENT.search(header)
    to = recipient[1] if recipient else ""
    name = to.removeprefix(PREFIX)
    if parameters is not None and name and (name != to or parameters.knows(to)):
        yield from _call(reader, name)
        return
    reasons = "analysis" in header or (recipient and name == to)

    def emit(text: str) -> None:
        if reasons:
            reader.delta.add_reasoning(text)
        else:
            reader.delta.add_content(text)

    if not reasons:
        yield from _text(reader, emit, TextKind.CONTENT)
        return
    reader.turn()
    mark = yield from _text(reader, emit, TextKind.REASONING)
    reader.skip(-len(mark))
    reader.turn()
    reader.skip(len(mark))


def _call(reader: Reader, name: str) -> Steps[None]:
    number = reader.calls

    def emit(text: str) -> None:
        if text:
            if reader.calls == number:
                reader.start_call(name)
            reader.arguments(text)

    try:
        yield from _text(reader, emit)
    finally:
        if reader.calls == number and not reader.cut:
            emit("{}")


def _text(reader: Reader, emit: Callable[[str], object], kind: TextKind | None = None) -> Steps[str]:
    """Read a text and what ends it, which is returned; empty if that belongs to the next message."""
    while True:
        mark = yield from reader.until(*_ENDS, emit=emit, kind=kind)
        if mark != CHANNEL or (yield from _names_channel(reader, emit)):
            break
    if mark in (START, CHANNEL):
        reader.skip(-len(mark))
        return ""
    return mark


def _names_channel(reader: Reader, emit: Callable[[str], object]) -> Steps[bool]:
    """Whether a channel follows its mark, which was read; otherwise the mark is text."""
    reader.skip(-len(CHANNEL))
    reader.begin()
    reader.skip(len(CHANNEL))
    yield from reader.space()
    named = bool((yield from reader.either(*_CHANNELS, MESSAGE)))
    if named:
        reader.back()
        reader.skip(len(CHANNEL))
    else:
        emit(reader.since_begin(less=0))
        reader.settle()
    return named
