"""Spells a reply (reasoning, text, tool calls) in a model's own format, by its chat template.

A template shows a model its earlier replies as the model writes them, so the reply is what the template adds
to the prompt for a message of the assistant.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.generation.parsers.call_writing import Calls, json_text
from penstock.generation.parsers.harmony import CHANNEL, COMMENTARY, FINAL, in_channel
from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.parsers.registry import OutputFormat
from penstock.generation.parsers.value_types import Parameters
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.renderer import ConversationRenderer
from penstock.generation.request.schemas import Function, FunctionCall, Message, Tool, ToolCall
from penstock.http.errors import ApiError

_PROBE = "probe of the end"
_MARK_STARTS = "<[ \n"
"""Characters with which a part of what ends a turn may begin."""


class CannotRender(ValueError):
    """The model has no format for such a reply, or its template does not show it."""


class ReplyRenderer:
    """Spells replies for one model."""

    def __init__(self, template: ChatTemplate | None, format: OutputFormat) -> None:
        self._renderer = None if template is None else ConversationRenderer(template, format.tools)
        self._format = format

    def outputs(self, text: str, reasoning: str, calls: Calls) -> list[str]:
        """The output of a model that replies so, then what it would write where a request allows less of it:
        no reasoning, or calls alone. Raises CannotRender."""
        found = [self._spell(text, reasoning, calls), self._spell(text, "", calls)]
        if calls:
            found.append(self._spell("", "", calls))
        return list(dict.fromkeys(found))

    def forced_outputs(self, text: str, reasoning: str, calls: Calls) -> list[str]:
        """Outputs where a request forces the format: text, or calls as ``tool_choice`` required and a
        function ask for them, after the reasoning or without. Raises CannotRender."""
        forced = [text]
        if calls:
            parsed = [(name, _object(arguments)) for name, arguments in calls]
            listed = [{"name": name, "parameters": arguments} for name, arguments in parsed]
            forced = [json_text(listed), json_text(parsed[0][1])]
        found = []
        if self._format.harmony:
            channel = COMMENTARY if calls else FINAL
            found = [in_channel(channel, output, each) for output in forced for each in (reasoning, "")]
        elif self._renderer is not None and self._format.reasoning is not None:
            prompt = self._prompt(calls)
            found = [
                self._with_reasoning(prompt, each, output) for output in forced for each in (reasoning, "")
            ]
        return list(dict.fromkeys([*found, *forced]))

    def _prompt(self, calls: Calls) -> str:
        try:
            return self._render([], calls)
        except ApiError as error:
            raise CannotRender(f"the chat template refuses it: {error}") from None

    def _spell(self, text: str, reasoning: str, calls: Calls) -> str:
        if self._renderer is None:
            if reasoning or calls:
                raise CannotRender("the model has no chat template")
            return text
        if calls and not self._format.calls_tools:
            raise CannotRender("the format of the model's tool calls is unknown (see --tool-call-parser)")
        if reasoning and not (self._format.reasoning or self._format.harmony):
            raise CannotRender("the format of the model's reasoning is unknown (see --reasoning-parser)")
        try:
            prompt = self._render([], calls)
            output = self._reply(prompt, text, calls) if calls else text
        except ApiError as error:
            raise CannotRender(f"the chat template refuses it: {error}") from None
        output = self._with_reasoning(prompt, reasoning, output)
        if calls:
            self._check(prompt, output, calls)
        return output

    def _with_reasoning(self, prompt: str, reasoning: str, output: str) -> str:
        if self._format.harmony:
            if not reasoning:
                return output
            begun = output.lstrip().startswith((CHANNEL, "to="))
            return in_channel("" if begun else FINAL, output, reasoning)
        if self._format.reasoning is None:
            return output
        opening, closing = self._format.reasoning.opens[0], self._format.reasoning.closes[0]
        inside = prompt.rstrip().endswith(opening)
        shown, closed, rest = output.partition(closing)
        if closed and not shown.replace(opening, "").strip():  # the template shows that there was none
            output = rest
        if not (reasoning or inside):
            return output
        return f"{'' if inside else opening}{reasoning}{closing}{output}"

    def _render(self, reply: list[Message], calls: Calls) -> str:
        assert self._renderer is not None
        tools = [Tool(function=Function(name=name, parameters={})) for name, _ in calls]
        return self._renderer.render(
            [Message("user", "?"), *reply], add_generation_prompt=not reply, tools=tools or None
        )

    def _reply(self, prompt: str, text: str, calls: Calls) -> str:
        """What the template adds to the prompt for the reply, without what ends a turn."""
        shown = self._render([_message(text, calls)], calls)
        plain = self._render([_message(_PROBE, ())], calls)
        before, _, after = plain.rpartition(_PROBE)
        same = (pair[0] == pair[1] for pair in zip(prompt, before, strict=False))
        start = next((at for at, equal in enumerate(same) if not equal), min(len(prompt), len(before)))
        output = shown[self._mark_at(shown, start) :]
        ends = (after[at:] for at in range(len(after)) if not at or after[at] in _MARK_STARTS)
        output = output.removesuffix(next(filter(output.endswith, ends), ""))
        for number, (_, arguments) in enumerate(calls):
            if isinstance(arguments, str):
                place = _written(number)
                output = output.replace(f'"{place}"', arguments).replace(place, arguments)
        return output

    def _mark_at(self, shown: str, at: int) -> int:
        """Where the opening starts that is at this place of a prompt; the place, if none is."""
        parts = (self._format.tools, self._format.reasoning)
        marks = [mark for part in parts if part is not None for mark in part.opens]
        starts = [shown.find(mark, max(0, at - len(mark) + 1), at + len(mark) - 1) for mark in marks]
        return min([at, *(start for start in starts if start >= 0)])

    def _check(self, prompt: str, output: str, calls: Calls) -> None:
        """Raises CannotRender if the API servers would not read the calls back."""
        known = self._format
        format = MessageFormat(known.reasoning_parser(prompt, calls=True), known.call_parser(Parameters({})))
        delta = MessageParser(format).push(output, last=True)
        names = [call.name for call in delta.calls if call.name is not None]
        if names != [name for name, _ in calls]:
            raise CannotRender(f"the chat template shows it as {output[:200]!r}, which has the calls {names}")


def _message(text: str, calls: Calls) -> Message:
    made = []
    for number, (name, arguments) in enumerate(calls):
        given = _written(number) if isinstance(arguments, str) else arguments
        # Mistral's templates take ids of nine characters.
        made.append(ToolCall(FunctionCall(name, given), f"call{number:05}"))
    return Message("assistant", text, tool_calls=made or None)


def _written(number: int) -> str:
    """Stands for arguments that are a text, which is taken as it is, in a prompt."""
    return f"\ue000arguments {number}\ue001"


def _object(arguments: dict[str, Any] | str) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
