"""What names the session of a request, besides ``--session-header``."""

from __future__ import annotations

from collections.abc import Mapping

AGENT_HEADERS = (b"x-claude-code-session-id", b"session-id")
"""Headers of Claude Code and Codex, constant in a session."""


def session_named(headers: Mapping[bytes, bytes], first: bytes) -> str | None:
    """The session that headers name: by ``first``, or as agents do; None: none does."""
    for name in (first, *AGENT_HEADERS):
        if (value := headers.get(name)) is not None:
            return value.decode("latin-1")
    return None
