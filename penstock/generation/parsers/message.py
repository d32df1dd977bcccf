"""One choice's output as a message: reasoning split off, then tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

from penstock.generation.parsers.delta import Delta, OutputParser


def new_call_id() -> str:
    """An id in the shape of OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


class MessageFormat(NamedTuple):
    """What the outputs of one request consist of, beside content; the same for all of its choices."""

    reasoning: Callable[[], OutputParser] | None = None
    """Makes the parser that splits reasoning off; None: there is none."""
    tools: Callable[[], OutputParser] | None = None
    """Makes the parser that reads tool calls; None: there are none."""
    show_reasoning: bool = True
    """Whether reasoning is sent, or dropped."""
    one_call: bool = False
    """Whether all calls but the first are dropped."""
    named: bool = False
    """Whether the request names the function that is called."""


class MessageParser:
    """Runs the parsers of a request over one choice: what the first leaves as content goes to the second."""

    def __init__(self, format: MessageFormat, new_id: Callable[[], str] = new_call_id) -> None:
        self._format = format
        self._reasoning = format.reasoning() if format.reasoning else None
        self._tools = format.tools() if format.tools else None
        self._new_id = new_id
        self.called = False
        """Whether the model has chosen to call."""

    @property
    def idle(self) -> bool:
        """Whether everything that follows is content."""
        return (self._reasoning is None or self._reasoning.idle) and (self._tools is None or self._tools.idle)

    def push(self, text: str, *, last: bool) -> Delta:
        """What the next piece of the output adds to the message; ``last``: it is the final one."""
        if self._reasoning is None:
            delta = Delta(content=text)
        else:
            delta = self._reasoning.push(text)
            if last:
                delta.add(self._reasoning.finish())
            if not self._format.show_reasoning:
                delta.reasoning = ""
        if self._tools is not None:
            content, delta.content = delta.content, ""
            delta.add(self._tools.push(content))
            if last:
                delta.add(self._tools.finish())
            self._settle_calls(delta)
        return delta

    def _settle_calls(self, delta: Delta) -> None:
        if self._format.one_call:
            delta.calls = [call for call in delta.calls if call.index == 0]
        for call in delta.calls:
            self.called = not self._format.named
            if call.name is not None:
                call.id = self._new_id()
