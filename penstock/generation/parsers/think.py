"""Parses reasoning between ``<think>`` and ``</think>`` at an output's start."""

from __future__ import annotations

from penstock.generation.parsers.delta import Delta
from penstock.streaming.stop_strings import held_back

OPEN = "<think>"
CLOSE = "</think>"


class ThinkParser:
    """Reasoning starts with the tag; some templates put the tag at the end of the prompt."""

    markers = (OPEN, CLOSE)
    guard = ""

    def __init__(self, prompt: str) -> None:
        """``prompt``: the text before the output."""
        self.idle = False
        self._inside = prompt.rstrip().endswith(OPEN)
        self._held = ""

    @staticmethod
    def detects(template: str) -> bool:
        """Whether a chat template uses this format."""
        return CLOSE in template

    @property
    def open(self) -> bool:
        return self.idle

    def push(self, text: str) -> Delta:
        if self.idle:
            return Delta(content=text)
        text, self._held = self._held + text, ""
        if not self._inside:
            start = text.lstrip()
            if not start.startswith(OPEN):
                if OPEN.startswith(start):
                    self._held = text
                    return Delta()
                self.idle = True
                return Delta(content=text)
            self._inside = True
            text = start[len(OPEN) :]
        reasoning, tag, content = text.partition(CLOSE)
        if tag:
            self.idle = True
            return Delta(reasoning=reasoning, content=content)
        safe = len(text) - held_back(text, CLOSE)
        self._held = text[safe:]
        return Delta(reasoning=text[:safe])

    def finish(self, *, cut: bool) -> Delta:
        held, self._held = self._held, ""
        return Delta(reasoning=held) if self._inside else Delta(content=held)
