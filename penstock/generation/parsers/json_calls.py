"""Parses outputs that consist of tool calls: ``{"name": …, "parameters": {…}}``, one or several.

Llama 3 models separate calls by semicolons; outputs under the grammar of ``tool_choice`` are JSON lists.
"""

from __future__ import annotations

from penstock.generation.parsers.delta import Delta
from penstock.generation.parsers.scanner import CallScanner

TAG = "<|python_tag|>"
"""May precede the first call."""
TAG_START = "<|"
"""Held back text that starts so is the tag, or its beginning."""
_BEFORE = " \t\r\n["
_BETWEEN = " \t\r\n;,]"


class JsonCallsParser:
    """An output that does not start with a call is all content."""

    markers = (TAG,)
    guard = ""

    def __init__(self) -> None:
        self.idle = False
        self._held = ""
        self._prefix = ""
        """Text before the current object; it becomes content if the object is no call."""
        self._scanner: CallScanner | None = None
        self._calls = 0

    @staticmethod
    def detects(template: str) -> bool:
        """Whether a chat template asks for this format."""
        return TAG in template or '"parameters": dictionary of argument name and its value' in template

    @property
    def open(self) -> bool:
        return self.idle

    def push(self, text: str) -> Delta:
        if self.idle:
            return Delta(content=text)
        delta = Delta()
        self._held += text
        while self._held and self._step(delta):
            pass
        return delta

    def finish(self, *, cut: bool) -> Delta:
        if self.idle:
            return Delta()
        self.idle = True
        scanner = self._scanner
        text = self._prefix + (self._held if scanner is None else scanner.raw)
        if scanner is not None:
            call = scanner.started or (cut and (scanner.name is not None or self._calls > 0))
        else:
            call = self._calls > 0 and not text.strip(_BETWEEN)
        if call or (cut and text.strip().startswith(TAG_START)):
            return Delta()
        return Delta(content=text)

    def _step(self, delta: Delta) -> bool:
        """Parse on; false if more text is needed or no call can follow."""
        if self._scanner is not None:
            return self._scan(self._scanner, delta)
        rest = self._held.lstrip(_BETWEEN if self._calls else _BEFORE)
        self._prefix += self._held[: len(self._held) - len(rest)]
        self._held = rest
        tag = not self._calls and TAG not in self._prefix
        if tag and rest.startswith(TAG):
            self._prefix += TAG
            self._held = rest[len(TAG) :]
            return True
        if not rest or (tag and TAG.startswith(rest)):
            return False
        if rest[0] != "{":
            return self._give_up(delta)
        self._scanner = CallScanner()
        return True

    def _scan(self, scanner: CallScanner, delta: Delta) -> bool:
        self._held, call = scanner.read(self._held, self._calls)
        if call is not None:
            delta.add_call(call)
        if not (scanner.done or scanner.broken):
            return False
        self._scanner = None
        if not scanner.started:
            self._prefix += scanner.raw
            return self._give_up(delta)
        self._calls += 1
        self._prefix = ""
        return True

    def _give_up(self, delta: Delta) -> bool:
        """Text that is no call: all that follows is content."""
        delta.add_content(self._prefix + self._held)
        self._prefix = self._held = ""
        self.idle = True
        return False


class RequiredCallsParser:
    """An output that the grammar of ``tool_choice`` forces to be calls: a call that is cut before its
    arguments begin is dropped, for nothing of such an output is content."""

    idle = open = False
    guard = ""

    def __init__(self) -> None:
        self._parser = JsonCallsParser()

    def push(self, text: str) -> Delta:
        return Delta(calls=self._parser.push(text).calls)

    def finish(self, *, cut: bool) -> Delta:
        return Delta(calls=self._parser.finish(cut=cut).calls)
