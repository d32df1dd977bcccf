"""What the router asks about endpoints that only prefill."""

from __future__ import annotations

import asyncio
from typing import Protocol

from penstock.gateway.routing.pick_request import PickRequest


class RemotePrefill(Protocol):
    """Has prompts computed by other endpoints than those that answer."""

    @property
    def applies(self) -> bool:
        """Whether it has such endpoints."""
        ...

    def restrict(self, subset: frozenset[str] | None) -> frozenset[str] | None:
        """URLs of the endpoints of ``subset`` (None: of all) that answer requests; None: all do."""
        ...

    async def compute_prompt(self, request: PickRequest, gone: asyncio.Future[None] | None) -> None:
        """Have the prompt of a request computed, if that pays, and set ``request.transfer``.
        ``gone``: of the client; None: the call is cancelled then. Failures are none of the request's."""
        ...
