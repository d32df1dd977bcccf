"""Splits one choice's output into reasoning, tool calls and content."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

from penstock.generation.parsers.answer_tags import AnswerTags, Tags
from penstock.generation.parsers.custom_input import CustomInput
from penstock.generation.parsers.delta import CallDelta, Delta, OutputParser, TextDelta, TextKind, TurnParser
from penstock.generation.parsers.escapes import WholeEscapes
from penstock.streaming.stop_strings import StopMatcher


def new_call_id() -> str:
    """A tool call id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


class MessageFormat(NamedTuple):
    """Which parsers the outputs of one request need; the same for all of its choices."""

    reasoning: Callable[[], TurnParser] | None = None
    """Makes the parser of reasoning; None: there is no reasoning."""
    tools: Callable[[], OutputParser] | None = None
    """Makes the parser of tool calls; None: there are no calls."""
    show_reasoning: bool = True
    """Whether reasoning is sent; otherwise it is dropped."""
    one_call: bool = False
    """Whether calls after the first are dropped."""
    named: bool = False
    """Whether the request names the function to call."""
    custom: frozenset[str] = frozenset()
    """Names of functions that are custom tools: see CallDelta.custom."""
    tags: Tags = ()
    """What the model puts around its answer."""


class MessageParser:
    """Runs the parsers of a request over one choice: the content of the first one is input of the second."""

    def __init__(
        self,
        format: MessageFormat,
        new_id: Callable[[], str] = new_call_id,
        stops: StopMatcher | None = None,
    ) -> None:
        """``stops``: what ends the message if its content has it. Reasoning and calls are not searched."""
        self._format = format
        self._reasoning = format.reasoning() if format.reasoning else None
        self._tools = format.tools() if format.tools else None
        self._answer = AnswerTags(format.tags) if format.tags else None
        self._new_id = new_id
        self._escapes = WholeEscapes()
        """Escapes within the last call's arguments."""
        self._call = -1
        """Number of the last call."""
        self._input: CustomInput | None = None
        """Input of the last call, if it is of a custom tool."""
        self.called = False
        """Whether the model has decided to call a tool."""
        self._stops = stops
        self.stop: str | None = None
        """The stop string that has ended the message; what follows it is dropped."""

    @property
    def idle(self) -> bool:
        """Whether all text that follows is content."""
        return all(part.idle for part in (self._reasoning, self._tools, self._answer) if part is not None)

    @property
    def open(self) -> TextKind | None:
        """What text without any character of :attr:`guard` and without white space at its end is, so that it
        need not be pushed; None: it must be."""
        kind = TextKind.CONTENT if self._reasoning is None else self._reasoning.open
        if kind is TextKind.REASONING:
            return kind if self._format.show_reasoning else None
        for part in (self._tools, self._answer):
            kind = kind if kind is None or part is None else part.open
        return kind

    @property
    def reasons(self) -> bool:
        """Whether reasoning is parsed."""
        return self._reasoning is not None

    def take_turns(self) -> tuple[list[int], int]:
        """Where in the text of all pieces reasoning has begun and ended by turns, since the last call; and
        from where on it may still begin or end."""
        assert self._reasoning is not None
        return self._reasoning.take_turns()

    @property
    def guard(self) -> str:
        """The characters with which a marker may begin while the parser is open."""
        return "".join(
            part.guard for part in (self._reasoning, self._tools, self._answer) if part is not None
        )

    def push(self, text: str, *, last: bool, cut: bool = False, exempt: bool = False) -> Delta:
        """The delta of the next piece of the output. ``last``: it is the final one; ``cut``: as max_tokens
        ended the output; ``exempt``: it is not searched for stop strings."""
        stops = self._stops
        if exempt:
            self._stops = None
        delta = Delta()
        if self._reasoning is None:
            self._add(delta, TextDelta(text))
        else:
            self._add_all(delta, self._reasoning.push(text))
            if last:
                self._add_all(delta, self._reasoning.finish(cut=cut))
        if self._tools is not None and last:
            self._add_calls(delta, self._tools.finish(cut=cut))
        if last or self.stop is not None:
            self._end_call(delta)
            self._end_content(delta, cut=cut)
        self._stops = stops
        return delta

    def pass_on(self, read: Delta) -> Delta:
        """The delta of what another server has divided into reasoning, content and calls."""
        delta = Delta()
        self._add_all(delta, read)
        return delta

    def _add_all(self, delta: Delta, read: Delta) -> None:
        for piece in read.pieces:
            self._add(delta, piece)

    def _add(self, delta: Delta, piece: TextDelta | CallDelta) -> None:
        """Add what the parser of reasoning has read, which may have calls; its content is input of the parser
        of tool calls."""
        if self.stop is not None:
            return
        if isinstance(piece, CallDelta):
            self._add_call(delta, piece)
        elif piece.reasoning:
            if self._format.show_reasoning:
                self._end_content(delta)
                delta.add_reasoning(piece.text)
        elif self._tools is None:
            self._add_content(delta, piece.text)
        else:
            self._add_calls(delta, self._tools.push(piece.text))

    def _add_content(self, delta: Delta, text: str) -> None:
        self._add_answer(delta, text if self._answer is None else self._answer.push(text))

    def _add_answer(self, delta: Delta, text: str) -> None:
        if self.stop is None and self._stops is not None:
            text, self.stop = self._stops.push(text)
        delta.add_content(text)

    def _end_content(self, delta: Delta, *, cut: bool = False) -> None:
        """Something else follows: a tag and a stop string have no more text."""
        if self._answer is not None:
            self._add_answer(delta, self._answer.finish(cut=cut))
        if self._stops is not None:
            delta.add_content(self._stops.finish())

    def _add_calls(self, delta: Delta, read: Delta) -> None:
        """Add content and calls, without surplus calls. New ones get their ids."""
        for piece in read.pieces:
            if self.stop is not None:
                return
            if isinstance(piece, CallDelta):
                self._add_call(delta, piece)
            else:
                self._add_content(delta, piece.text)

    def _add_call(self, delta: Delta, piece: CallDelta) -> None:
        if piece.index and self._format.one_call:
            return
        self.called = not self._format.named
        if piece.name is not None:
            piece.id = piece.id or self._new_id()
            self._end_call(delta)
            self._end_content(delta)
            self._call = piece.index
            if piece.name in self._format.custom:
                self._input = CustomInput()
        piece.custom = self._input is not None
        piece.arguments = self._passed(self._escapes.push(piece.arguments))
        if piece.name is not None or piece.arguments:
            delta.add_call(piece)

    def _passed(self, arguments: str) -> str:
        return arguments if self._input is None else self._input.push(arguments)

    def _end_call(self, delta: Delta) -> None:
        """The last call has ended."""
        rest = self._passed(self._escapes.finish())
        if self._input is not None:
            rest += self._input.finish()
        if rest:
            delta.add_call(CallDelta(self._call, None, rest, custom=self._input is not None))
        self._input = None
