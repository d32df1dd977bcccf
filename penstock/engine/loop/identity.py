"""What an engine process is called, in messages, metrics and spans."""

from __future__ import annotations

from typing import NamedTuple


class EngineIdentity(NamedTuple):
    """One start of one engine."""

    rank: int
    epoch: int = 0
    """Number of the start of this rank."""
    incarnation: int = 0
    """The start of the server that it belongs to."""
    build: str = ""
    """The release, in a fleet of several hosts."""
    model: str = ""
    """Value of the metrics' label ``model_name``."""
