"""Conversations of every shape under the chat templates of real models: run by "make test-templates".

A request's prompt must be the one that transformers renders, wherever that is without loss. Wherever it is
not, or transformers raises, the prompt must still have every text, argument and result of the conversation.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from tests.templates.archives import PACKAGES, real_templates

if not PACKAGES.exists():
    pytest.skip('the packages are missing: run "make test-templates"', allow_module_level=True)

from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.http.errors import ApiError
from tests.generation.planning import error_or_none, planners
from tests.templates.known import KNOWN, SKIPPED
from tests.templates.reference import TOKENS, fuller, lost, noise, references
from tests.templates.summary import SUMMARY
from tests.templates.talks import Talk, talks

MIXED = 60
"""Conversations with several unusual properties."""
TEMPLATES = real_templates()
TALKS = talks(MIXED)


class Finding(NamedTuple):
    """What is wrong with one prompt."""

    kind: str
    """raised, lost, noise or different."""
    talk: str
    detail: str


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_real_template(name: str) -> None:
    source = TEMPLATES[name]
    chat = planners(template=ChatTemplate({"default": source}, TOKENS)).chat
    findings = []
    for talk in TALKS:
        found = _finding(source, talk, chat)
        if found is not None:
            findings.append(found)
    SUMMARY.add(name, len(TALKS), [found.kind for found in findings])
    if name in SKIPPED:
        assert any(found.kind == "raised" for found in findings), f"{name} is not skipped any more"
        return
    known = KNOWN.get(name, {})
    unexplained = [found for found in findings if found.kind not in known]
    assert not unexplained, "\n".join(map(repr, unexplained[:5]))
    assert known.keys() == {found.kind for found in findings}, "known.py lists what does not happen"


def _finding(source: str, talk: Talk, chat: Any) -> Finding | None:
    body = json.dumps({"messages": talk.messages, "tools": talk.tools, **talk.options}).encode()
    wanted = list(references(source, talk))
    error = error_or_none(chat, body)
    if error is not None:
        allowed = not wanted and _cannot_continue(talk, error)
        return None if allowed else Finding("raised", talk.name, error.message)
    prompt = chat(body).prompts[0]
    wanted = [each for each in wanted if not fuller(source, talk, prompt, each)]
    if prompt in wanted[:1]:
        return None
    gone, odd = lost(talk, prompt), noise(source, talk, prompt)
    if gone:
        return Finding("lost", talk.name, f"{gone} not in {prompt[-600:]!r}")
    if odd:
        return Finding("noise", talk.name, odd)
    clean = [each for each in wanted if not noise(source, talk, each)]
    uncut = "< /think>" in prompt  # what is before the mark is no reasoning, as which transformers renders it
    if clean and not uncut and prompt != clean[0]:
        pairs = enumerate(zip(prompt, clean[0], strict=False))
        at = max(0, next((at for at, pair in pairs if pair[0] != pair[1]), 0) - 40)
        return Finding("different", talk.name, f"{prompt[at : at + 100]!r}, want {clean[0][at : at + 100]!r}")
    return None


def _cannot_continue(talk: Talk, error: ApiError) -> bool:
    """Whether a template is said not to show the reasoning that is to be continued."""
    return error.param == "continue_final_message" and talk.shape["end"] == "continued reasoning"
