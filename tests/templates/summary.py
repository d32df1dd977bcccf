"""Counts what the tests of real templates found."""

from __future__ import annotations

from collections import Counter


class Summary:
    """Templates, conversations and findings of one run."""

    def __init__(self) -> None:
        self.templates = 0
        self.conversations = 0
        self.findings: Counter[str] = Counter()
        self.by_template: dict[str, Counter[str]] = {}

    def add(self, name: str, conversations: int, kinds: list[str]) -> None:
        self.templates += 1
        self.conversations += conversations
        self.findings.update(kinds)
        if kinds:
            self.by_template[name] = Counter(kinds)

    def lines(self) -> list[str]:
        kinds = ("raised", "lost", "noise", "different")
        counts = ", ".join(f"{self.findings[kind]} {kind}" for kind in kinds)
        lines = [f"{self.templates} templates, {self.conversations} prompts: {counts}"]
        for name, found in sorted(self.by_template.items()):
            lines.append(f"  {name}: " + ", ".join(f"{count} {kind}" for kind, count in found.items()))
        return lines


SUMMARY = Summary()
