"""The parsers by the names options give them, and which of them a model needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from .hermes import HermesParser
from .llama3 import Llama3JsonParser
from .message import MessageParser
from .think import ThinkParser

TOOL_PARSERS: dict[str, type[HermesParser] | type[Llama3JsonParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
}
REASONING_PARSERS: dict[str, type[ThinkParser]] = {"think": ThinkParser}


class OutputFormat(msgspec.Struct, frozen=True):
    """How a model writes tool calls and reasoning; None: it does not, or in a way that is not known."""

    tools: type[HermesParser] | type[Llama3JsonParser] | None = None
    reasoning: type[ThinkParser] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts the parsers look for; where they are special tokens, outputs must keep those."""
        return (
            *(self.tools.markers if self.tools else ()),
            *(self.reasoning.markers if self.reasoning else ()),
        )

    def parser(
        self, prompt: str, *, tools: bool, show_reasoning: bool, one_call: bool
    ) -> Callable[[], MessageParser] | None:
        """Makes the parser of each choice that follows ``prompt``; None when there is nothing to parse.

        ``tools``: whether the request may be answered by calls.
        """
        if self.reasoning is None and not (tools and self.tools):
            return None
        return partial(self._parser, prompt, tools, show_reasoning, one_call)

    def _parser(self, prompt: str, tools: bool, show_reasoning: bool, one_call: bool) -> MessageParser:
        return MessageParser(
            self.reasoning(prompt) if self.reasoning else None,
            self.tools() if tools and self.tools else None,
            show_reasoning=show_reasoning,
            one_call=one_call,
        )


def output_format(tool_parser: str, reasoning_parser: str, template: str) -> OutputFormat:
    """The format that options name. ``template``: text of the chat template, which decides for ``auto``."""
    tools = next((each for each in TOOL_PARSERS.values() if each.detects(template)), None)
    reasoning = next((each for each in REASONING_PARSERS.values() if each.detects(template)), None)
    return OutputFormat(
        tools if tool_parser == "auto" else TOOL_PARSERS.get(tool_parser),
        reasoning if reasoning_parser == "auto" else REASONING_PARSERS.get(reasoning_parser),
    )
