"""The field ``encrypted_content`` of reasoning items: what a client sends back that keeps nothing else.

It is not encrypted. A client that may read a response may read its reasoning, and may write whatever it likes
into a prompt: a key would protect nothing, and every server that a session moves to would need it.
"""

from __future__ import annotations

from base64 import b64decode, urlsafe_b64encode

_PREFIX = "penstock1."


def seal_reasoning(text: str) -> str:
    """``text`` in a form that JSON need not escape."""
    return _PREFIX + urlsafe_b64encode(text.encode()).decode()


def open_reasoning(sealed: str) -> str | None:
    """The text; None if it was sealed elsewhere, as by OpenAI."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        return b64decode(sealed[len(_PREFIX) :], b"-_", validate=True).decode()
    except ValueError:
        return None
