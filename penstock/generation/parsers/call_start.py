"""Tells a call within reasoning, which ends it, from a mention of the format's marks."""

from __future__ import annotations

from penstock.generation.parsers.call_syntax import Section
from penstock.generation.parsers.calls import read_opening
from penstock.generation.parsers.reader import EndOfOutput, NotACall, Reader, Steps
from penstock.generation.parsers.value_types import Parameters

PART = 256
"""Characters that are tried at a time: most texts that are no call show it in a few."""


class CallStart:
    """How calls start in a model's format, to functions of the request."""

    __slots__ = ("_parameters", "section")

    def __init__(self, section: Section, parameters: Parameters) -> None:
        self.section = section
        self._parameters = parameters

    def follows(self, reader: Reader, mark: str, closes: tuple[str, ...]) -> Steps[bool]:
        """Whether a call follows, which begins with ``mark``. If not, what was tried of the text is
        reasoning, which ``closes`` end."""
        trial = _Trial(self.section, self._parameters)
        reader.begin()
        try:
            while trial.verdict is None:
                end, close = reader.find(*closes)
                end -= 0 if close else reader.held(closes)
                while trial.verdict is None and reader.at < end:
                    part = reader.text[reader.at : min(end, reader.at + PART)]
                    reader.skip(len(part))
                    trial.push(part)
                if trial.verdict is None:
                    if close:
                        trial.verdict = False
                    else:
                        yield from reader.more()
        except EndOfOutput:
            trial.finish(cut=reader.cut)
        if trial.verdict:
            reader.back()
        else:
            reader.reason(less=trial.unread, at_least=len(mark))
        return bool(trial.verdict)


class _Trial:
    """One text that may be a call."""

    def __init__(self, section: Section, parameters: Parameters) -> None:
        self.verdict: bool | None = None
        """Whether it is; None: it is not known."""
        self._reader = _CallReader(parameters.has)
        self._steps = self._read(section, parameters)
        next(self._steps)

    @property
    def unread(self) -> int:
        """Characters at its end that do not tell."""
        return len(self._reader.text) - self._reader.at

    def push(self, text: str) -> None:
        self._reader.feed(text, self._steps)

    def finish(self, *, cut: bool) -> None:
        self._reader.finish(self._steps, cut=cut)
        self.verdict = bool(self.verdict)

    def _read(self, section: Section, parameters: Parameters) -> Steps[None]:
        reader = self._reader
        try:
            yield from read_opening(reader, section)
            yield from section.read(reader, parameters)
            self.verdict = False
        except _Called:
            self.verdict = True
        except (NotACall, EndOfOutput):
            self.verdict = False


class _Called(Exception):
    """A call to a function of the request has started."""


class _CallReader(Reader):
    """Reads up to the first call."""

    __slots__ = ()

    def start_call(self, name: str, id: str | None = None) -> None:
        super().start_call(name, id)
        raise _Called
