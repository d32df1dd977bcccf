"""Why there are no pages of a picture."""

from __future__ import annotations

from penstock.wire.media.worker import Refusal


class Refused(Exception):
    """A picture is not prepared. ``message`` is for the client: it names the value and what is allowed."""

    def __init__(self, code: Refusal, message: str) -> None:
        super().__init__(message)
        self.code: Refusal = code
        self.message = message
