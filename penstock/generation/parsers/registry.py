"""Tool call and reasoning formats by option name, and the detection of those that a model uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from penstock.generation.parsers import harmony
from penstock.generation.parsers.call_start import CallStart
from penstock.generation.parsers.call_syntax import SPECIAL, Section
from penstock.generation.parsers.calls import NO_PARAMETERS, CallParser
from penstock.generation.parsers.delta import OutputParser, TurnParser
from penstock.generation.parsers.formats import (
    HARMONY_MARKS,
    MODEL_TYPES,
    REASONING_FORMATS,
    REASONING_MARKS,
    TOOL_FORMATS,
    TOOL_MARKS,
    Marks,
)
from penstock.generation.parsers.reasoning import Reasoning, ReasoningParser
from penstock.generation.parsers.value_types import Parameters

HARMONY_TOOLS, HARMONY_REASONING = "openai", "openai_gptoss"
"""Names of gpt-oss' format, which is one for calls and reasoning: either name selects it."""
TOOL_PARSERS = sorted((*TOOL_FORMATS, HARMONY_TOOLS))
REASONING_PARSERS = sorted((*REASONING_FORMATS, HARMONY_REASONING))


class OutputFormat(msgspec.Struct, frozen=True):
    """How a model writes tool calls and reasoning; None: not at all, or in an unknown format."""

    tools: Section | None = None
    reasoning: Reasoning | None = None
    harmony: bool = False
    """Whether both are in harmony; ``tools`` and ``reasoning`` are None."""

    @property
    def calls_tools(self) -> bool:
        """Whether the format of calls is known."""
        return self.harmony or self.tools is not None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts the parsers search for; if they are special tokens, outputs must keep special tokens."""
        if self.harmony:
            return harmony.MARKERS
        tools = self.tools.markers() if self.tools else ()
        reasoning = self.reasoning.markers() if self.reasoning else ()
        return (*tools, *reasoning, *(token for text in reasoning for token in SPECIAL.findall(text)))

    def before_continued(self, prompt: str, text: str, reasoning: str) -> str:
        """What stands for the text before the output in a prompt that ends with the beginning of a reply:
        ``text``, or ``reasoning`` if there is no text."""
        if self.harmony:
            return prompt.removesuffix((text or reasoning).rstrip())
        if self.reasoning is None or not (text or reasoning):
            return prompt
        opened = max(text.rfind(mark) for mark in self.reasoning.opens)
        closed = max(text.rfind(mark) for mark in self.reasoning.closes)
        return self.reasoning.opens[0] if not text or opened > closed else self.reasoning.closes[0]

    def reasons_after(self, prompt: str) -> bool:
        """Whether the text before an output ends within reasoning."""
        if self.harmony:
            return "analysis" in harmony.header_of(prompt)
        return self.reasoning is not None and self.reasoning.is_open(prompt)

    def reasoning_parser(
        self, prompt: str, *, calls: bool, parameters: Parameters = NO_PARAMETERS
    ) -> Callable[[], TurnParser] | None:
        """Make the parser of the reasoning after ``prompt``; in harmony that of calls too, if the request
        allows ``calls``. ``parameters``: of the functions that may be called."""
        known = parameters if calls else None
        if self.harmony:
            return partial(harmony.HarmonyParser, prompt, known)
        if self.reasoning is None:
            return None
        ends = None if self.tools is None or known is None else CallStart(self.tools, known)
        return partial(ReasoningParser, prompt, self.reasoning, ends)

    def call_parser(self, parameters: Parameters) -> Callable[[], OutputParser] | None:
        """Make the parser of calls, unless that of reasoning parses them."""
        return partial(CallParser, self.tools, parameters) if self.tools else None

    @property
    def guard(self) -> str:
        """The characters with which markers may begin: see OutputParser."""
        if self.harmony:
            return harmony.GUARD
        tools = self.tools.guard() if self.tools else ""
        return tools + (self.reasoning.guard() if self.reasoning else "")


def output_format(
    tool_parser: str, reasoning_parser: str, template: str, model_type: str = ""
) -> OutputFormat:
    """The format for the options' parser names. ``auto``: by the ``template``, the text of the chat template,
    or by ``model_type`` of config.json."""
    by_type = MODEL_TYPES.get(model_type, ("", ""))
    speaks_harmony = all(mark in template for mark in HARMONY_MARKS)
    if tool_parser == "auto":
        tool_parser = HARMONY_TOOLS if speaks_harmony else _named(TOOL_MARKS, template) or by_type[0]
    if reasoning_parser == "auto":
        reasoning_parser = (
            HARMONY_REASONING if speaks_harmony else _named(REASONING_MARKS, template) or by_type[1]
        )
    if tool_parser == HARMONY_TOOLS or reasoning_parser == HARMONY_REASONING:
        return OutputFormat(harmony=True)
    return OutputFormat(TOOL_FORMATS.get(tool_parser), REASONING_FORMATS.get(reasoning_parser))


def _named(table: tuple[tuple[Marks, str], ...], template: str) -> str:
    """The name of the first format whose marks are all in the template; empty if there is none."""
    return next((name for marks, name in table if all(mark in template for mark in marks)), "")
