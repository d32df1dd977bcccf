"""docs/from-vllm.md: every option of Penstock's has its place there."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.config.introspect import options_of
from penstock.config.rules.serve_rules import NOT_OF_VLLM
from penstock.config.serve import ServeConfig
from penstock.engine.attach.launch.serve_command import OTHER_NAME, SAME_NAME

PAGES = Path(__file__).parent.parent.parent / "docs"
PAGE = (PAGES / "from-vllm.md").read_text()


def flags(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]*", text))


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def columns(text: str, column: int) -> set[str]:
    """The flags of one column of a section's tables."""
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    return {flag for row in rows for flag in flags(row[column])}


SHARED = columns(section("The same, before `--`"), 2)
ALONE = columns(section("Penstock's alone"), 1)
OPTIONS = {option.flag for option in options_of(ServeConfig) if not option.positional} | {"--config"}


def test_every_option_has_a_counterpart_or_is_ours_alone() -> None:
    missing = sorted(OPTIONS - SHARED - ALONE)
    assert not missing, f"docs/from-vllm.md lacks {missing}"


def test_no_option_is_made_up() -> None:
    assert not (SHARED | ALONE) - OPTIONS


def test_what_is_passed_on_is_said() -> None:
    page = (PAGES / "vllm.md").read_text()
    passed = {f"--{field.replace('_', '-')}" for field in (*SAME_NAME, *OTHER_NAME, "async_scheduling")}
    assert passed <= SHARED
    assert passed <= flags(page)
    refused = {f"--{field.replace('_', '-')}" for field in NOT_OF_VLLM}
    assert refused <= flags(page)
