"""Tool call and reasoning parsers by option name, and the detection of those that a model needs."""

from __future__ import annotations

import msgspec

from penstock.generation.parsers.hermes import HermesParser
from penstock.generation.parsers.json_calls import JsonCallsParser
from penstock.generation.parsers.think import ThinkParser

TOOL_PARSERS: dict[str, type[HermesParser] | type[JsonCallsParser]] = {
    "hermes": HermesParser,
    "llama3_json": JsonCallsParser,
}
REASONING_PARSERS: dict[str, type[ThinkParser]] = {"think": ThinkParser}


class OutputFormat(msgspec.Struct, frozen=True):
    """How a model writes tool calls and reasoning; None: not at all, or in an unknown format."""

    tools: type[HermesParser] | type[JsonCallsParser] | None = None
    reasoning: type[ThinkParser] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts the parsers search for; if they are special tokens, outputs must keep special tokens."""
        tools = self.tools.markers if self.tools else ()
        return (*tools, *(self.reasoning.markers if self.reasoning else ()))

    @property
    def guard(self) -> str:
        """The characters with which markers may begin in content: see OutputParser."""
        return (self.reasoning.guard if self.reasoning else "") + (self.tools.guard if self.tools else "")


def output_format(tool_parser: str, reasoning_parser: str, template: str) -> OutputFormat:
    """The format for the options' parser names. ``template``: chat template text, which decides ``auto``."""
    tools = next((each for each in TOOL_PARSERS.values() if each.detects(template)), None)
    reasoning = next((each for each in REASONING_PARSERS.values() if each.detects(template)), None)
    return OutputFormat(
        tools if tool_parser == "auto" else TOOL_PARSERS.get(tool_parser),
        reasoning if reasoning_parser == "auto" else REASONING_PARSERS.get(reasoning_parser),
    )
