"""Spells a reply (reasoning, text, tool calls) in a model's own format, by its chat template.

A template shows a model its earlier replies as the model writes them, so the reply is what the template adds
to the prompt for a message of the assistant.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.parsers.registry import OutputFormat
from penstock.generation.parsers.think import CLOSE, OPEN
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.http.errors import ApiError

Calls = Sequence[tuple[str, dict[str, Any] | str]]
"""Name and arguments of each call."""
_ASKED = [{"role": "user", "content": "?"}]
_PROBE = "probe of the end"


class CannotSpell(ValueError):
    """The model has no format for such a reply, or its template does not show it."""


class ReplySpeller:
    """Spells replies for one model."""

    def __init__(self, template: ChatTemplate | None, format: OutputFormat) -> None:
        self._template = template
        self._format = format

    def spell(self, text: str, reasoning: str, calls: Calls) -> str:
        """The output of a model that replies so. Raises CannotSpell."""
        if not reasoning and not calls:
            return text
        if self._template is None:
            raise CannotSpell("the model has no chat template")
        if calls and self._format.tools is None:
            raise CannotSpell("the format of the model's tool calls is unknown (see --tool-call-parser)")
        if reasoning and self._format.reasoning is None:
            raise CannotSpell("the format of the model's reasoning is unknown (see --reasoning-parser)")
        try:
            prompt = self._render([])
            output = self._reply(prompt, text, calls) if calls else text
        except ApiError as error:
            raise CannotSpell(f"the chat template refuses it: {error}") from None
        inside = prompt.rstrip().endswith(OPEN)
        if reasoning or inside:
            output = f"{'' if inside else OPEN}\n{reasoning}\n{CLOSE}\n\n{output}"
        self._check(prompt, output, calls)
        return output

    def _render(self, reply: list[dict[str, Any]]) -> str:
        assert self._template is not None
        messages: list[dict[str, Any]] = [dict(each) for each in (*_ASKED, *reply)]
        return self._template.render(messages, add_generation_prompt=not reply)

    def _reply(self, prompt: str, text: str, calls: Calls) -> str:
        """What the template adds to the prompt for the reply, without what ends a turn."""
        shown = self._render([_message(text, calls)])
        plain = self._render([_message(_PROBE, ())])
        end = plain.rpartition(_PROBE)[2]
        start = _common(prompt, plain)
        output = shown[start:]
        return output.removesuffix(end)

    def _check(self, prompt: str, output: str, calls: Calls) -> None:
        """Raises CannotSpell if the API servers would not read the calls back."""
        reasoning, tools = self._format.reasoning, self._format.tools
        format = MessageFormat(reasoning and (lambda: reasoning(prompt)), tools)
        delta = MessageParser(format).push(output, last=True)
        names = [call.name for call in delta.calls if call.name is not None]
        if names != [name for name, _ in calls]:
            raise CannotSpell(f"the chat template spells it as {output[:200]!r}, which has the calls {names}")


def _message(text: str, calls: Calls) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call{number:05}",  # Mistral's templates take ids of nine letters and digits
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
    return message


def _common(prompt: str, shown: str) -> int:
    """Length of the beginning that a prompt and its reply share."""
    return next(
        (at for at, pair in enumerate(zip(prompt, shown)) if pair[0] != pair[1]), min(len(prompt), len(shown))
    )


def forced_formats(calls: Calls) -> list[str]:
    """The calls as ``tool_choice`` required and that of a function force them, in formats of their own."""
    parsed = [(name, _object(arguments)) for name, arguments in calls]
    listed = [{"name": name, "parameters": arguments} for name, arguments in parsed]
    return [
        json.dumps(listed, ensure_ascii=False),
        *(json.dumps(arguments, ensure_ascii=False) for _, arguments in parsed[:1]),
    ]


def _object(arguments: dict[str, Any] | str) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
