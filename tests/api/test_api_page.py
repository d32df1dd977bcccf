"""The pages of the API and of compatibility name every field, in the right table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_type_hints

import penstock
from penstock.dialects.chat.request_schema import UNSUPPORTED as CHAT
from penstock.dialects.chat.request_schema import ChatCompletionRequest
from penstock.dialects.completions.request_schema import UNSUPPORTED as COMPLETION
from penstock.dialects.completions.request_schema import CompletionRequest
from penstock.generation.request.schemas import GenerateRequest

DOCS = Path(penstock.__file__).parents[1] / "docs"
PAGE = (DOCS / "openai-api.md").read_text()
COMPATIBILITY = (DOCS / "compatibility.md").read_text()
REFUSED = {row.field for row in (*CHAT, *COMPLETION)}
WITHOUT_EFFECT = {
    name
    for type in (ChatCompletionRequest, CompletionRequest)
    for name, hint in get_type_hints(type, include_extras=True).items()
    for meta in getattr(hint, "__metadata__", ())
    if (meta.description or "").startswith("Not used")
}
"""As their descriptions in the code have it."""


def fields_below(heading: str, page: str = PAGE) -> set[str]:
    """What stands in the first column of the section's table."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {
        name
        for row in re.findall(r"^\|(.+?)\|", section, re.MULTILINE)
        for name in re.findall("`(.+?)`", row)
    }


def test_the_fields_of_both_endpoints() -> None:
    served = set(GenerateRequest.__struct_fields__) - REFUSED - WITHOUT_EFFECT
    named = fields_below("Fields of both generating endpoints") - {"store", "service_tier"}  # for example
    # One that another cell explains.
    assert named == served - {"include_stop_str_in_output"}


def test_the_fields_of_each_endpoint() -> None:
    for heading, type in (
        ("Fields of completions", CompletionRequest),
        ("Fields of chats", ChatCompletionRequest),
    ):
        own = set(type.__struct_fields__) - set(GenerateRequest.__struct_fields__)
        assert fields_below(heading) == own - REFUSED - WITHOUT_EFFECT


def test_the_fields_that_are_refused() -> None:
    assert fields_below("Refused") == REFUSED


def test_the_fields_without_effect() -> None:
    assert fields_below("Without effect", COMPATIBILITY) == WITHOUT_EFFECT
    assert not WITHOUT_EFFECT & REFUSED
