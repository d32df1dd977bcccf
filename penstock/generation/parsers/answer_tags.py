"""Drops the tags that a model puts around its answer, such as ``<answer>`` and ``</answer>``."""

from __future__ import annotations

from penstock.generation.parsers.delta import TextKind
from penstock.generation.parsers.reader import MIN_MARKER, EndOfOutput, Reader, Steps

Tags = tuple[tuple[str, str], ...]
"""Pairs of an opening and a closing tag. The opening may be empty: the model writes the closing one alone."""


class AnswerTags:
    """What one message's content is without its tags: the opening one at its start, and the closing one at
    its end or beside calls, each with the white space around it. All others are text."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._closes = tuple(close for opening, close in tags if not opening)
        """What may close the content."""
        self._first = True
        """Whether this is the content before the first call."""
        self.guard = "".join(sorted({tag[0] for pair in tags for tag in pair if tag}))
        self._start()

    def _start(self) -> None:
        self._reader = Reader()
        self._pushed = self._tagged = False
        """Whether there is content since the last call; whether what is held back has a tag."""
        self._steps = self._read(self._reader)
        next(self._steps)

    @property
    def idle(self) -> bool:
        """Whether all content that follows has no tags."""
        return self._reader.idle

    @property
    def open(self) -> TextKind | None:
        return self._reader.open

    def push(self, text: str) -> str:
        """The content of its next piece."""
        if not text or self._reader.idle:
            return text
        self._pushed = True
        return self._reader.feed(text, self._steps).content

    def finish(self, *, cut: bool) -> str:
        """The content that was held back: a call follows, or the end of the output, which max_tokens may
        have ``cut``."""
        if self._reader.idle or not self._pushed:
            return ""
        text = self._reader.finish(self._steps, cut=cut).content
        self._first = False
        self._start()
        return text

    def _read(self, reader: Reader) -> Steps[None]:
        try:
            reader.begin()
            yield from reader.space()
            if not self._first:
                yield from self._closing(reader)
            elif mark := (yield from reader.either(*(opening for opening, _ in self._tags))):
                self._closes += tuple(close for opening, close in self._tags if opening == mark)
                self._tagged = True
                yield from reader.space()
            if self._tagged:
                reader.settle()
            else:
                reader.give_up()
            while True:
                self._tagged = False
                yield from reader.content(self._closes)
                yield from self._closing(reader)
                reader.give_up()  # text follows, so they were text
        except EndOfOutput:
            rest = len(reader.text) - reader.at
            begun = reader.cut and rest >= MIN_MARKER  # a tag
            if not (begun or (self._tagged and (reader.cut or not rest))):
                reader.delta.add_content(reader.undecided())

    def _closing(self, reader: Reader) -> Steps[None]:
        """Read closing tags and white space after them, if they follow."""
        while (yield from reader.either(*self._closes)):
            self._tagged = True
            yield from reader.space()
