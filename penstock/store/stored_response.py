"""An entry of the response store."""

from __future__ import annotations

import msgspec

RUNNING = ("queued", "in_progress")
"""Statuses of a response that is still generated."""
QUEUED_EVENTS = 2
"""Events of a response in the background before it begins: that it was created, and that it waits."""


class StoredResponse(msgspec.Struct, gc=False):
    """One response and what it answered."""

    id: str
    tenant: str
    """Whose API key made it; empty without keys."""
    created_at: float
    """Unix seconds."""
    status: str
    """completed, incomplete, failed, cancelled, in_progress or queued."""
    body: bytes
    """The response object as JSON."""
    input: bytes
    """The request's own input items, each with its id, as a JSON list; not those of earlier responses."""
    previous_id: str | None
    """The response that it continues."""
    model: str
    output_ids: tuple[str, ...] | None = None
    """Ids of the items of the body's output, if they are known: to look for them in a long body takes long.
    The store does not keep them."""
