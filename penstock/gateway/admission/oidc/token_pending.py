"""The answer to a token that has not been checked yet."""

from __future__ import annotations

import asyncio

from penstock.http.errors import ApiError


class TokenPending(ApiError):
    """A token is being checked: wait, and ask again. A request that cannot wait is refused."""

    def __init__(self, settled: asyncio.Future[None]) -> None:
        super().__init__(401, "The token has not been checked yet: try again.", code="token_pending")
        self._settled = settled

    async def wait(self) -> None:
        """Wait until the token has been checked: two seconds at most, if its keys have to be fetched."""
        await asyncio.shield(self._settled)  # others wait for it as well
