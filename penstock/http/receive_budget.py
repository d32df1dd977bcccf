"""Bounds the bytes of requests that a server holds: partial heads, bodies, and requests behind others.

Per-request limits do not bound them: 65,536 connections of 64 MiB each are beyond any memory.
"""

from __future__ import annotations

from typing import Protocol

from penstock.http.admission import unavailable
from penstock.http.errors import ApiError


class Holder(Protocol):
    """A connection that holds bytes."""

    @property
    def receiving(self) -> bool:
        """Whether it holds bytes of a request that has not begun to be answered."""
        ...

    def on_over_budget(self) -> None:
        """Refuse that request and forget its bytes."""
        ...


class ReceiveBudget:
    """The bytes that all connections of a server hold. Beyond ``limit`` the connection that holds most of an
    incomplete request loses it, so that large bodies cannot keep out small ones."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._holders: dict[Holder, int] = {}

    @property
    def full(self) -> bool:
        """Whether complete requests alone, which none loses, are as large as the limit."""
        return self.held >= self.limit

    def refusal(self) -> ApiError:
        text = f"The server holds {self.limit} bytes of requests that are not answered, as many as it may."
        return unavailable(text, "too_many_bytes")

    def hold(self, holder: Holder, size: int) -> None:
        """``holder`` holds ``size`` bytes altogether."""
        self.held += size - self._holders.pop(holder, 0)
        if size:
            self._holders[holder] = size
        while self.held > self.limit:
            receiving = [each for each in self._holders if each.receiving]
            if not receiving:
                return
            largest = max(receiving, key=self._holders.__getitem__)
            self.held -= self._holders.pop(largest)
            largest.on_over_budget()
