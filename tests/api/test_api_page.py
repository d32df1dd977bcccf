"""The page of the API names every field, in the right table."""

from __future__ import annotations

import re
from pathlib import Path

import penstock
from penstock.dialects.chat.request_schema import UNSUPPORTED as CHAT
from penstock.dialects.chat.request_schema import ChatCompletionRequest
from penstock.dialects.completions.request_schema import UNSUPPORTED as COMPLETION
from penstock.dialects.completions.request_schema import CompletionRequest
from penstock.generation.request_schemas import GenerateRequest

PAGE = (Path(penstock.__file__).parents[1] / "docs" / "openai-api.md").read_text()
REFUSED = {row.field for row in (*CHAT, *COMPLETION)}


def fields_below(heading: str) -> set[str]:
    """What stands in the first column of the section's table."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {
        name
        for row in re.findall(r"^\|(.+?)\|", section, re.MULTILINE)
        for name in re.findall("`(.+?)`", row)
    }


def test_the_fields_of_both_endpoints() -> None:
    served = set(GenerateRequest.__struct_fields__) - REFUSED
    # One that another cell explains.
    assert fields_below("Fields of both generating endpoints") == served - {"include_stop_str_in_output"}


def test_the_fields_of_each_endpoint() -> None:
    for heading, type in (
        ("Fields of completions", CompletionRequest),
        ("Fields of chats", ChatCompletionRequest),
    ):
        own = set(type.__struct_fields__) - set(GenerateRequest.__struct_fields__)
        assert fields_below(heading) == own - REFUSED


def test_the_fields_that_are_refused() -> None:
    assert fields_below("Refused") == REFUSED
