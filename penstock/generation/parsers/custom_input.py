"""Takes the free text of a custom tool's call out of the arguments that a model writes for a function."""

from __future__ import annotations

import json
import re

CUSTOM_INPUT = "input"
"""The only parameter of the function that a custom tool is to the model."""
_START = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_WHOLE = re.compile(
    r'((?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*)'
)
"""Characters and whole escapes of a JSON string: what can be decoded whatever follows."""


class CustomInput:
    """Reads ``{"input": "…"}`` piece by piece. Arguments of any other form are the input as they are."""

    __slots__ = ("_arguments", "_inside", "_rest", "call")

    def __init__(self, call: int = 0) -> None:
        """``call``: number of the call."""
        self.call = call
        self._arguments = ""
        """All text before the input's first character; all text if there is no input."""
        self._rest = ""
        self._inside = False

    def push(self, arguments: str) -> str:
        """The input's next piece."""
        if not self._inside:
            self._arguments += arguments
            start = _START.match(self._arguments)
            if start is None:
                return ""
            self._inside = True
            arguments = self._arguments[start.end() :]
        self._rest += arguments
        whole = _WHOLE.match(self._rest)
        assert whole is not None
        self._rest = self._rest[whole.end() :]
        return _decoded(whole[1])

    def finish(self) -> str:
        """The last piece."""
        return "" if self._inside else self._arguments


def _decoded(text: str) -> str:
    try:
        decoded: str = json.loads(f'"{text}"', strict=False)
    except ValueError:  # an escape that JSON does not know
        return text
    return decoded
