"""Renders the messages of a request with the model's chat template, whatever the template takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.generation.parsers.call_syntax import Section
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.conversation import conversation, plain_tools, put_before_calls
from penstock.generation.prompt.resumed_loop import LoopState, Rendering
from penstock.generation.prompt.template_probe import probe
from penstock.generation.prompt.template_rules import PlainMessage, TemplateRules
from penstock.generation.prompt.turn_memory import NextTurn
from penstock.generation.prompt.turns import arranged
from penstock.generation.request.schemas import Message, Tool, ToolCall
from penstock.generation.request.unsupported_content import images_follow, numbers_of

_encode = msgspec.msgpack.Encoder().encode


class ConversationRenderer:
    """A chat template, and what it takes."""

    def __init__(self, template: ChatTemplate, format: Section | None = None, image_text: str = "") -> None:
        """``format``: how the model writes calls, if that is known. ``image_text``: what the template writes
        for a picture, if the model takes any."""
        self.template = template
        self._format = format
        # At the start: a request would wait for up to 80 ms (the slowest template).
        self._rules = {
            tools: probe(self._probed, tools=tools, image_text=image_text) for tools in (False, True)
        }

    def rules(self, *, tools: bool) -> TemplateRules:
        """What the template takes. ``tools``: of requests that have some."""
        return self._rules[tools]

    def _probed(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        return self.template.render(messages, add_generation_prompt=False, tools=tools)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[Tool] | None = None,
        documents: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        stable: bool = False,
        turn: NextTurn | None = None,
    ) -> str:
        """The prompt of at least one message. ``stable``: see :func:`arranged`; ``turn``: what it has in
        common with the turn before is taken from there; the others: see :meth:`ChatTemplate.render`. Pictures
        keep their order. Raises ApiError."""
        rules = self.rules(tools=bool(tools))
        if rules.image_text and numbers_of(messages):
            conversation(messages, rules)  # errors name fields by their places in the request
            messages = self._with_pictures(messages, rules, stable=stable)
        kept = turn is not None and rules.before_calls is None and not continue_final_message
        before = None if turn is None or not kept else turn.conversation
        known = [] if before is None else before.known(messages, rules)
        in_order = arranged(messages, rules, stable=stable, format=self._format, known=known)
        before_calls: list[str] = []
        if turn is None or not kept:
            plain, rendering = conversation(in_order, rules, before_calls), None
        else:
            if in_order is not messages:
                known = [] if before is None else before.known(in_order, rules)
            plain = conversation(in_order, rules, known=known)
            rendering = Rendering(None if before is None else before.loop)
        prompt = self.template.render(
            plain,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=plain_tools(tools, rules) if tools else rules.no_tools,
            documents=documents,
            variables=variables,
            rendering=rendering,
        )
        if turn is not None and rendering is not None:
            turn.learn_conversation(KeptConversation(in_order, plain, rules, rendering.finish(prompt)))
        return put_before_calls(prompt, before_calls, rules)

    def _with_pictures(
        self, messages: Sequence[Message], rules: TemplateRules, *, stable: bool
    ) -> Sequence[Message]:
        """The messages with pictures in those alone that may have them."""
        if not rules.pictures:
            return messages
        placed = images_follow(messages, rules.pictures)
        numbers = numbers_of(arranged(placed, rules, stable=stable, format=self._format))
        return placed if numbers == sorted(numbers) else images_follow(messages, ("user",))


@dataclass(slots=True, frozen=True)
class KeptConversation:
    """A conversation as it was rendered."""

    messages: Sequence[Message]
    """As the template takes them."""
    plain: list[PlainMessage]
    rules: TemplateRules
    loop: LoopState | None
    """Where the next rendering may begin; None: at the start."""

    def known(self, messages: Sequence[Message], rules: TemplateRules) -> list[PlainMessage]:
        """Those of the first messages that are the same here."""
        if rules is not self.rules:
            return []
        pairs = zip(messages, self.messages, strict=False)
        number = next((at for at, pair in enumerate(pairs) if not _same(*pair)), len(self.plain))
        return self.plain[: min(number, len(messages))]


def _same(one: Message, other: Message) -> bool:
    """Whether two messages are spelled alike; 1, 1.0 and true are equal, but no template spells them so."""
    if one is other:
        return True
    if one != other:
        return False
    if type(one.content) is list or not all(map(_has_text, one.tool_calls or ())):
        return _encode(one) == _encode(other)
    return True


def _has_text(call: ToolCall) -> bool:
    """Whether the arguments of a call are a text."""
    return call.function is not None and type(call.function.arguments) is str
