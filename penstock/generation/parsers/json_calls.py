"""Outputs that are nothing but tool calls: ``{"name": …, "parameters": {…}}``, or several, as Llama 3 models
write them with a semicolon between them, and outputs under a grammar as a list."""

from __future__ import annotations

from penstock.generation.parsers.delta import CallDelta, Delta
from penstock.generation.parsers.scanner import CallScanner

TAG = "<|python_tag|>"
"""May stand before the first call."""
_BEFORE = " \t\r\n["
_BETWEEN = " \t\r\n;,]"


class JsonCallsParser:
    """An output that does not start with a call is content to its end: no text is searched for one."""

    markers = (TAG,)

    def __init__(self) -> None:
        self.idle = False
        self._held = ""
        self._prefix = ""
        """What was read before the object in progress and is content if that is no call."""
        self._scanner: CallScanner | None = None
        self._calls = 0

    @staticmethod
    def detects(template: str) -> bool:
        """Whether a chat template asks for this format."""
        return TAG in template or '"parameters": dictionary of argument name and its value' in template

    def push(self, text: str) -> Delta:
        if self.idle:
            return Delta(content=text)
        delta = Delta()
        self._held += text
        while self._held and self._step(delta):
            pass
        return delta

    def finish(self) -> Delta:
        if self.idle:
            return Delta()
        self.idle = True
        if self._scanner is not None:
            return Delta() if self._scanner.started else Delta(content=self._prefix + self._scanner.raw)
        text = self._prefix + self._held
        return Delta() if self._calls and not text.strip(_BETWEEN) else Delta(content=text)

    def _step(self, delta: Delta) -> bool:
        """Read on; false when more text is needed, or no call can follow."""
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
        fresh = not scanner.started
        self._held = scanner.push(self._held)
        if scanner.started:
            name = scanner.name if fresh else None
            arguments = scanner.take_arguments()
            if name is not None or arguments:
                delta.add(Delta(calls=[CallDelta(self._calls, name, arguments)]))
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
        """What is not a call ends the search for calls."""
        delta.content += self._prefix + self._held
        self._prefix = self._held = ""
        self.idle = True
        return False
