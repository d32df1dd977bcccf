"""Conversations of Responses and Messages under the templates of real models: nothing of them is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.templates.archives import PACKAGES, real_templates

if not PACKAGES.exists():
    pytest.skip('the packages are missing: run "make test-templates"', allow_module_level=True)

from penstock.config.serve import ServeConfig
from penstock.dialects.messages.dialect import Messages
from penstock.dialects.responses.dialect import Responses
from penstock.generation.prompt.chat_template import ChatTemplate
from tests.generation.planning import tiny_input_processor
from tests.templates.known import KNOWN, SKIPPED
from tests.templates.other_apis import messages_body, responses_body
from tests.templates.reference import TOKENS, lost, noise
from tests.templates.talks import Talk, talks

TEMPLATES = {name: text for name, text in real_templates().items() if name not in SKIPPED}
TALKS = [talk for talk in talks(60) if not talk.options]


@pytest.mark.parametrize("name", TEMPLATES)
def test_responses_and_messages(name: str) -> None:
    source = TEMPLATES[name]
    processor = tiny_input_processor(template=ChatTemplate({"default": source}, TOKENS))
    responses, messages = Responses(ServeConfig(), processor), Messages(ServeConfig(), processor)
    objects = [talk for talk in TALKS if talk.shape["arguments"] != "broken"]  # Messages takes nothing else
    bad = _bad(source, TALKS, lambda talk: str(responses.plan(responses_body(talk)).prompts[0]))
    bad += _bad(source, objects, lambda talk: str(messages.plan(messages_body(talk)).prompts[0]))
    assert not bad or "lost" in KNOWN.get(name, {}), "\n".join(bad[:5])


def _bad(source: str, given: list[Talk], prompt: Callable[[Talk], str]) -> list[str]:
    found = []
    for talk in given:
        text = prompt(talk)
        gone, odd = lost(talk, text), noise(source, talk, text)
        if gone or odd:
            found.append(f"{talk.name}: {gone or odd} in {text[-600:]!r}")
    return found
