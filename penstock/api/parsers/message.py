"""One choice's output as a message: reasoning split off, then tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from .delta import Delta, OutputParser


def new_call_id() -> str:
    """An id in the shape of OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


class MessageParser:
    """Runs the parsers of a request over one choice: what the first leaves as content goes to the second."""

    def __init__(
        self,
        reasoning: OutputParser | None,
        tools: OutputParser | None,
        *,
        show_reasoning: bool = True,
        one_call: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """``show_reasoning`` false: reasoning is dropped. ``one_call``: all calls but the first are."""
        self._reasoning = reasoning
        self._tools = tools
        self._show_reasoning = show_reasoning
        self._one_call = one_call
        self._new_id = new_id
        self.called = False
        """Whether there has been a tool call."""

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
            if not self._show_reasoning:
                delta.reasoning = ""
        if self._tools is not None:
            content, delta.content = delta.content, ""
            delta.add(self._tools.push(content))
            if last:
                delta.add(self._tools.finish())
            self._settle_calls(delta)
        return delta

    def _settle_calls(self, delta: Delta) -> None:
        if self._one_call:
            delta.calls = [call for call in delta.calls if call.index == 0]
        for call in delta.calls:
            self.called = True
            if call.name is not None:
                call.id = self._new_id()
