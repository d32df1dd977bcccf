"""Keeps responses for those who ask for them later, at any API server of this host."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable

from penstock.store.stored_response import StoredResponse

PREFIX = "resp_"


class ResponseStore:
    """One API server's access to the store. ``tenant``: of the API key that asks; empty without keys."""

    store_id: str
    """12 hexadecimal characters, drawn when the store was made, in the id of every response in it."""

    def new_id(self) -> str:
        """An id for a response that is to be stored here."""
        return f"{PREFIX}{self.store_id}{secrets.token_hex(12)}"

    def get(self, id: str, tenant: str) -> Awaitable[StoredResponse | None]:
        """The response; None if there is none, it has expired or belongs to another tenant."""
        raise NotImplementedError

    def chain(self, id: str, tenant: str) -> Awaitable[list[StoredResponse]]:
        """The response and those that it continues, oldest first. Raises ApiError if one of them is missing,
        expired, of another tenant or still generated, and if they are too many or too large."""
        raise NotImplementedError

    def item(self, id: str, tenant: str) -> Awaitable[bytes | None]:
        """An input or output item of a stored response, as JSON, by the item's id."""
        raise NotImplementedError

    def put(self, response: StoredResponse) -> asyncio.Future[None]:
        """Store a response. The result is set once it is committed; its exception if it could not be."""
        raise NotImplementedError

    def delete(self, id: str, tenant: str) -> Awaitable[bool]:
        """Delete a response; False if there is none."""
        raise NotImplementedError
