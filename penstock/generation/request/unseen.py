"""Content that models cannot see: they read a sentence in its place, and the client gets a warning.

Tools show images and files to agents, which send them with every later request. One that is refused would end
the conversation for ever.
"""

from __future__ import annotations


def unseen(kind: str) -> str:
    """What the model reads in the place of an ``image`` or a ``document``."""
    article = "An" if kind[0] in "aeiou" else "A"
    return f"[{article} {kind} was sent here. This model reads text only and cannot see it.]"


class Unseen:
    """What of a conversation the model cannot see."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def tell(self, kind: str) -> str:
        self._kinds.add(kind)
        return unseen(kind)

    def warning(self, field: str) -> str | None:
        """For the client; ``field`` has the conversation."""
        if not self._kinds:
            return None
        kinds = ", ".join(f"{kind}s" for kind in sorted(self._kinds))
        return f"{field}: the model reads text only and cannot see {kinds}; it was told so in their place"
