"""Parses tool calls of Hermes and Qwen models: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from penstock.generation.parsers.delta import CallDelta, Delta
from penstock.generation.parsers.scanner import CallScanner
from penstock.streaming.stop_strings import held_back

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
OPEN_START = "<tool"
"""Held back text that starts so is the beginning of a tag; shorter ones may be of anything."""


class HermesParser:
    """Calls may occur anywhere in the text. Whitespace before and between them is dropped; text between the
    tags that is no call is content."""

    markers = (OPEN, CLOSE)
    idle = False
    guard = OPEN[0]

    def __init__(self) -> None:
        self._held = ""
        self._gap = ""
        """Whitespace dropped before the current call; it becomes content if that is no call."""
        self._scanner: CallScanner | None = None
        self._closing = False
        self._calls = 0

    @staticmethod
    def detects(template: str) -> bool:
        """Whether a chat template asks for this format, and not for XML between the same tags."""
        return OPEN in template and "<function=" not in template and "<arg_key>" not in template

    @property
    def open(self) -> bool:
        return not self._held and self._scanner is None and not self._closing

    def push(self, text: str) -> Delta:
        delta = Delta()
        self._held += text
        while self._held and self._step(delta):
            pass
        return delta

    def finish(self, *, cut: bool) -> Delta:
        held, self._held = self._held, ""
        if self._scanner is not None:
            scanner, self._scanner = self._scanner, None
            dropped = scanner.started or cut
            return Delta() if dropped else Delta(content=self._gap + OPEN + scanner.raw)
        if self._closing or (self._calls and not held.strip()):
            return Delta()
        if cut and held.lstrip().startswith(OPEN_START):
            return Delta()
        return Delta(content=held)

    def _step(self, delta: Delta) -> bool:
        """Parse on; false if more text is needed."""
        if self._scanner is not None:
            return self._scan(self._scanner, delta)
        if self._closing:
            return self._close()
        return self._content(delta)

    def _content(self, delta: Delta) -> bool:
        before, tag, after = self._held.partition(OPEN)
        if not tag:
            safe = len(before) - held_back(before, OPEN)
            safe = len(before[:safe].rstrip())
            delta.add_content(before[:safe])
            self._held = before[safe:]
            return False
        text = before.rstrip()
        delta.add_content(text)
        self._gap, self._held = before[len(text) :], after
        self._scanner = CallScanner()
        return True

    def _scan(self, scanner: CallScanner, delta: Delta) -> bool:
        self._held, call = scanner.read(self._held, self._calls)
        ended = scanner.done or scanner.broken
        if scanner.done and not scanner.started and scanner.name is not None:
            call = CallDelta(self._calls, scanner.name, "{}")
        elif ended and not scanner.started:
            delta.add_content(self._gap + OPEN + scanner.raw)
            self._scanner = None
            return True
        if call is not None:
            delta.add_call(call)
        if not ended:
            return False
        self._calls += 1
        self._scanner, self._closing = None, True
        return True

    def _close(self) -> bool:
        """Skip the closing tag after a call, if there is one."""
        rest = self._held.lstrip()
        if not rest.startswith(CLOSE) and CLOSE.startswith(rest):
            return False
        self._closing = False
        if rest.startswith(CLOSE):
            self._held = rest[len(CLOSE) :]
        return True
