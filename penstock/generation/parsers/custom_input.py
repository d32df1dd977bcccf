"""Takes the free text of a custom tool's call out of the arguments that a model writes for a function."""

from __future__ import annotations

from penstock.generation.parsers.escapes import decoded_text
from penstock.generation.parsers.reader import EndOfOutput, NotACall, Reader, Steps

CUSTOM_INPUT = "input"
"""The only parameter of the function that a custom tool is to the model."""


class CustomInput:
    """Reads ``{"input": "…"}`` piece by piece. Arguments of any other form are the input as they are."""

    __slots__ = ("_reader", "_steps")

    def __init__(self) -> None:
        self._reader = Reader()
        self._steps = _read(self._reader)
        next(self._steps)

    def push(self, arguments: str) -> str:
        """The input's next piece. ``arguments`` cut no escape."""
        return self._reader.feed(arguments, self._steps).content

    def finish(self) -> str:
        """The last piece."""
        return self._reader.finish(self._steps, cut=False).content


def _read(reader: Reader) -> Steps[None]:
    try:
        reader.begin()
        yield from _opening(reader)
        reader.settle()
        yield from reader.string(lambda text: reader.delta.add_content(decoded_text(text)))
        while True:  # what follows is no part of it
            reader.at = len(reader.text)
            yield from reader.more()
    except NotACall:
        reader.give_up()
        yield from reader.content(())
    except EndOfOutput:
        reader.delta.add_content(reader.undecided())


def _opening(reader: Reader) -> Steps[None]:
    for mark in ("{", f'"{CUSTOM_INPUT}"', ":", '"'):
        yield from reader.space()
        yield from reader.expect(mark)
