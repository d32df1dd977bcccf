"""The edits of a conversation that a request asks its server to make."""

from __future__ import annotations

from typing import Any

from penstock.http.errors import ApiError, shown

_KEEPS_ALL = ("all", {"type": "all"})


def unapplied_edits(given: Any) -> str | None:
    """What the client should know of ``context_management``: which of its edits are not made. Without them
    the model reads more than it would, and nothing is missing. Raises ApiError."""
    if given is None:
        return None
    edits = given.get("edits") or [] if isinstance(given, dict) else None
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        message = "context_management must be an object with a list of edits."
        raise ApiError(400, message, param="context_management")
    names = {shown(str(edit.get("type"))): None for edit in edits if not _is_empty(edit)}
    if not names:
        return None
    return f"context_management: the conversation is taken as it is, without {', '.join(names)}"


def _is_empty(edit: dict[str, Any]) -> bool:
    """Whether it is no edit of what the request has: it keeps all thinking, or has its own rules as
    compaction."""
    kind = str(edit.get("type"))
    return kind.startswith("compact_") or (
        kind.startswith("clear_thinking_") and edit.get("keep") in _KEEPS_ALL
    )
