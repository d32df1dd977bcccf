"""Renders the messages of a request with the model's chat template, whatever the template takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.generation.parsers.call_syntax import Section
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.conversation import conversation, plain_tools, put_before_calls
from penstock.generation.prompt.template_probe import probe
from penstock.generation.prompt.template_rules import TemplateRules
from penstock.generation.prompt.turns import arranged
from penstock.generation.request.schemas import Message, Tool


class ConversationRenderer:
    """A chat template, and what it takes."""

    def __init__(self, template: ChatTemplate, format: Section | None = None) -> None:
        """``format``: how the model writes calls, if that is known."""
        self.template = template
        self._format = format
        # At the start: a request would wait for up to 80 ms (the slowest template).
        self._rules = {tools: probe(self._probed, tools=tools) for tools in (False, True)}

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
    ) -> str:
        """The prompt of at least one message. ``stable``: see :func:`arranged`; the others: see
        :meth:`ChatTemplate.render`. Raises ApiError."""
        rules = self.rules(tools=bool(tools))
        before_calls: list[str] = []
        prompt = self.template.render(
            conversation(arranged(messages, rules, stable=stable, format=self._format), rules, before_calls),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=plain_tools(tools, rules) if tools else rules.no_tools,
            documents=documents,
            variables=variables,
        )
        return put_before_calls(prompt, before_calls, rules)
