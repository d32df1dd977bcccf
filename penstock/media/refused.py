"""Why there are no pages of a picture."""

from __future__ import annotations

from penstock.wire.media.worker import Refusal


class Refused(Exception):
    """``message`` is for the client: it names the value and what is allowed, and no field. It has no
    credentials, no query of a URL and no address of the server's network. ``key``, ``size``: of the pages
    that found no room, if that is why."""

    def __init__(self, code: Refusal, message: str, key: bytes = b"", size: int = 0) -> None:
        super().__init__(message)
        self.code: Refusal = code
        self.message = message
        self.key = key
        self.size = size
