"""Splits one choice's output into reasoning, tool calls and content."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

from penstock.generation.parsers.delta import Delta, OutputParser


def new_call_id() -> str:
    """A tool call id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


class MessageFormat(NamedTuple):
    """Which parsers the outputs of one request need; the same for all of its choices."""

    reasoning: Callable[[], OutputParser] | None = None
    """Makes the parser of reasoning; None: there is no reasoning."""
    tools: Callable[[], OutputParser] | None = None
    """Makes the parser of tool calls; None: there are no calls."""
    show_reasoning: bool = True
    """Whether reasoning is sent; otherwise it is dropped."""
    one_call: bool = False
    """Whether calls after the first are dropped."""
    named: bool = False
    """Whether the request names the function to call."""


class MessageParser:
    """Runs the parsers of a request over one choice: the content of the first one is input of the second."""

    def __init__(self, format: MessageFormat, new_id: Callable[[], str] = new_call_id) -> None:
        self._format = format
        self._reasoning = format.reasoning() if format.reasoning else None
        self._tools = format.tools() if format.tools else None
        self._new_id = new_id
        self.called = False
        """Whether the model has decided to call a tool."""

    @property
    def idle(self) -> bool:
        """Whether all text that follows is content."""
        return (self._reasoning is None or self._reasoning.idle) and (self._tools is None or self._tools.idle)

    @property
    def open(self) -> bool:
        """Whether text without any character of :attr:`guard` and without white space at its end is content
        that need not be pushed."""
        return (self._reasoning is None or self._reasoning.open) and (self._tools is None or self._tools.open)

    @property
    def guard(self) -> str:
        """The characters with which a marker may begin while the parser is open."""
        return (self._reasoning.guard if self._reasoning else "") + (self._tools.guard if self._tools else "")

    def push(self, text: str, *, last: bool, cut: bool = False) -> Delta:
        """The delta of the next piece of the output. ``last``: it is the final one; ``cut``: as max_tokens
        ended the output."""
        if self._reasoning is None:
            delta = Delta(content=text)
        else:
            delta = self._reasoning.push(text)
            if last:
                delta.add(self._reasoning.finish(cut=cut))
            if not self._format.show_reasoning:
                delta.reasoning = ""
        if self._tools is not None:
            content, delta.content = delta.content, ""
            delta.add(self._tools.push(content))
            if last:
                delta.add(self._tools.finish(cut=cut))
            self._complete_calls(delta)
        return delta

    def _complete_calls(self, delta: Delta) -> None:
        """Drop surplus calls and give new ones their ids."""
        if self._format.one_call:
            delta.calls = [call for call in delta.calls if call.index == 0]
        for call in delta.calls:
            self.called = not self._format.named
            if call.name is not None:
                call.id = self._new_id()
