"""Which endpoints have which stored responses, learned from the replies that the gateway relays."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable

from penstock.gateway.routing.endpoint import Endpoint

_STORE = re.compile(r"resp_([0-9a-f]{12})[0-9a-f]{24}").fullmatch
"""The id of a response of a Penstock server, which begins with the id of its store."""
MAX_IDS = 1 << 16
"""Responses remembered; the least recently used ones are evicted."""
MAX_STORES = 1 << 12


class ResponseOwners:
    """Maps responses to the endpoint that made them, and stores to the endpoints that use them."""

    def __init__(self, most_ids: int = MAX_IDS, most_stores: int = MAX_STORES) -> None:
        self._most_ids = most_ids
        self._most_stores = most_stores
        self._makers: OrderedDict[int, Endpoint] = OrderedDict()
        """Endpoints by Python's hash of the response's id, which a server chooses at any length."""
        self._users: OrderedDict[str, list[Endpoint]] = OrderedDict()
        """Endpoints that use a store, by its name."""
        self.on_learn: Callable[[str, Endpoint], None] = lambda id, endpoint: None
        """Called with what this worker has learned by itself."""

    def learn(self, id: str, endpoint: Endpoint, *, reported: bool = False) -> None:
        """The endpoint has this response. ``reported``: by another worker."""
        if endpoint.removed:  # its last requests go on
            return
        if not reported:
            self.on_learn(id, endpoint)
        key = hash(id)
        self._makers[key] = endpoint
        self._makers.move_to_end(key)
        if len(self._makers) > self._most_ids:
            self._makers.popitem(last=False)
        if (store := _STORE(id)) is not None:
            users = self._users.setdefault(store[1], [])
            self._users.move_to_end(store[1])
            if endpoint not in users:
                users.append(endpoint)
            if len(self._users) > self._most_stores:
                self._users.popitem(last=False)

    def of(self, id: str) -> list[Endpoint]:
        """Endpoints that have the response; the one that made it is the first. Empty: unknown."""
        maker, store = self._makers.get(hash(id)), _STORE(id)
        users = [] if store is None else self._users.get(store[1], [])
        return users if maker is None else [maker, *(each for each in users if each is not maker)]

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left the pool."""
        for key in [key for key, value in self._makers.items() if value is endpoint]:
            del self._makers[key]
        for store, users in list(self._users.items()):
            if endpoint in users:
                users.remove(endpoint)
                if not users:
                    del self._users[store]
