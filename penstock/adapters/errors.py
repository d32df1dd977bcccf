"""The error of an adapter that cannot be loaded."""

from __future__ import annotations

MAX_SHOWN_CHARS = 1000


def json_problem(error: Exception) -> str:
    """Why JSON cannot be decoded. ``error``: msgspec's, UnicodeDecodeError or RecursionError."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


class AdapterError(ValueError):
    """An adapter that cannot be loaded. The message names the file, the field or the layer, its value and
    what is allowed; it is bounded, as part of it comes from the adapter's files."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= MAX_SHOWN_CHARS else f"{message[:MAX_SHOWN_CHARS]}…")
