"""Clients whose requests fail wherever they go, so that no second endpoint is held responsible for them."""

from __future__ import annotations

from collections import OrderedDict

MAX_CLIENTS = 4096
"""Clients remembered; those whose latest failure is the oldest are evicted."""
MEMORY_S = 10.0
"""Time after which a failure is forgotten."""


class FailingClients:
    """The clients whose latest requests have failed, each with the place where that began.

    A request that breaks the server that runs it (a prompt that crashes it) breaks the next one as well. From
    the first failure of a client to its next good reply, only the endpoint where that failure was is held
    responsible.
    """

    def __init__(self) -> None:
        self._began: OrderedDict[str, tuple[object, float]] = OrderedDict()
        """Where the failures of a client began, and when the latest one was."""

    def failed(self, client: str, place: object, now: float) -> bool:
        """A request of ``client`` has failed at ``place``; whether the place may be held responsible."""
        began, at = self._began.get(client, (place, now))
        if now - at > MEMORY_S:
            began = place
        self._began[client] = began, now
        self._began.move_to_end(client)
        if len(self._began) > MAX_CLIENTS:
            self._began.popitem(last=False)
        return began is place

    def served(self, client: str) -> None:
        """A request of ``client`` got a good reply."""
        self._began.pop(client, None)

    def forget(self, place: object) -> None:
        """The place is gone."""
        for client in [client for client, (began, _) in self._began.items() if began is place]:
            del self._began[client]
