"""Links between the pages lead somewhere."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from penstock import __version__

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*/*.md")]
PAGES += [ROOT / "penstock" / "demo" / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = []
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(f"{link}#{anchor}")
    assert not missing


@cache
def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def test_the_index_has_each_page_once() -> None:
    index = ROOT / "docs" / "README.md"
    listed = re.findall(r"^\| \[[^]]+\]\(([a-z0-9-]+\.md)\)", index.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in index.parent.glob("*.md") if page != index)


def test_the_readme_fits_on_two_screens_and_leads_to_the_index() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    assert "(docs/README.md)" in text
    assert __version__ in text


def test_the_architecture_fits_on_a_page() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 90


PINS = "".join((ROOT / f"requirements-clients{name}.txt").read_text() for name in ("", "-openai2"))
PACKAGES: dict[str, str] = {
    name: version
    for kind in ("clients/node", "agents")
    for name, version in json.loads((ROOT / "tests" / kind / "package.json").read_text())[
        "dependencies"
    ].items()
}
CLIENTS = {
    "openai (Python)": "openai",
    "LangChain (`langchain-openai`)": "langchain-openai",
    "LiteLLM": "litellm",
    "pydantic-ai": "pydantic-ai-slim",
    "OpenAI Agents SDK": "openai-agents",
    "instructor": "instructor",
    "llama-index": "llama-index-core",
    "DSPy": "dspy",
    "`google-genai`": "google-genai",
    "`ollama`": "ollama",
    "`llm`": "llm",
    "AI SDK (`ai`, Node)": "node: ai",
    "openai (Node)": "node: openai",
    "smolagents": "smolagents",
    "Haystack": "haystack-ai",
    "agno": "agno",
    "LangGraph": "langgraph",
    "Anthropic SDK (Node)": "node: @anthropic-ai/sdk",
    "OpenAI Agents SDK (Node)": "node: @openai/agents",
    "LangChain (Node)": "node: @langchain/openai",
    "`@google/genai` (Node)": "node: @google/genai",
    "`ollama` (Node)": "node: ollama",
    "[Codex](#codex)": "node: @openai/codex",
    "[Claude Code](#claude-code)": "node: @anthropic-ai/claude-code",
    "[openai](#openai)": "openai",
    "[anthropic](#anthropic)": "anthropic",
    "[OpenAI Agents SDK](#openai-agents-sdk)": "openai-agents",
    "[LangChain](#langchain)": "langchain-openai",
    "[pydantic-ai](#pydantic-ai)": "pydantic-ai-slim",
    "[LiteLLM](#litellm)": "litellm",
    "[AI SDK](#ai-sdk)": "node: ai",
}
"""The packages of the clients in the tables of versions."""


@pytest.mark.parametrize("page", ["compatibility", "agents"])
def test_versions_of_clients_are_those_that_are_tested(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (?:[a-z-]+ )?([0-9][0-9., ]*) \|", text, re.MULTILINE)
    rows = [(client, versions) for client, versions in rows if client in CLIENTS]
    assert len(rows) > 8
    for client, versions in rows:
        package = CLIENTS[client]
        if package.startswith("node: "):
            pinned = {PACKAGES[package.removeprefix("node: ")]}
        else:
            pinned = set(re.findall(rf"^{package}==([0-9.]+)", PINS, re.MULTILINE))
        for version in versions.split(", "):
            assert any(f"{pin}.".startswith(f"{version}.") for pin in pinned), (client, version, pinned)
