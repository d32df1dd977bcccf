"""Responses that are not stored, kept for the next requests of the connection that made them.

A client of a WebSocket continues its last response by id although ``store`` is false, as at OpenAI. What its
connection keeps is gone with it.
"""

from __future__ import annotations

from penstock.store.stored_response import StoredResponse

MAX_BYTES = 16 << 20
"""Responses of one connection; as much as a body with the whole conversation may have."""
MAX_ALL_BYTES = 256 << 20
"""Responses of all connections of an API server. Beyond them the connection loses its own that has not used
them for longest: its client is told that the response is not found, and sends the conversation again."""


class RecentResponses:
    """Those of one connection."""

    __slots__ = ("_all", "_entries", "size")

    def __init__(self, all: AllRecentResponses) -> None:
        self._all = all
        self._entries: dict[str, StoredResponse] = {}
        self.size = 0
        """Bytes of its responses."""

    def keep(self, response: StoredResponse) -> None:
        """Keep a response that has ended; the oldest ones leave for it."""
        size = _size(response)
        if size > MAX_BYTES:
            return
        while self.size + size > MAX_BYTES:
            self._drop(next(iter(self._entries)))
        self._entries[response.id] = response
        self._all.count(self, size)

    def chain(self, id: str) -> list[StoredResponse]:
        """The response and those that it continues, as far as they are here, oldest first."""
        found: list[StoredResponse] = []
        next: str | None = id
        while next is not None and (response := self._entries.get(next)) is not None:
            found.append(response)
            next = response.previous_id
        if found:
            self._all.count(self, 0)
        found.reverse()
        return found

    def clear(self) -> None:
        """Forget all: the connection has ended, or others need the room."""
        self._entries.clear()
        self._all.count(self, -self.size)

    def _drop(self, id: str) -> None:
        self._all.count(self, -_size(self._entries.pop(id)))


class AllRecentResponses:
    """Those of all connections of an API server."""

    def __init__(self, limit: int = MAX_ALL_BYTES) -> None:
        self._limit = limit
        self._used: dict[RecentResponses, None] = {}
        """Connections that keep some; what was used last stands last."""
        self.size = 0

    def count(self, connection: RecentResponses, more: int) -> None:
        """The connection uses its responses, and has ``more`` bytes of them."""
        self.size += more
        connection.size += more
        self._used.pop(connection, None)
        if connection.size:
            self._used[connection] = None
        while self.size > self._limit and len(self._used) > 1:
            next(iter(self._used)).clear()


def _size(response: StoredResponse) -> int:
    return len(response.body) + len(response.input) + 1024
