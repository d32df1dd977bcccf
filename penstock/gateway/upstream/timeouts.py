"""How long the gateway waits for model servers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits in seconds; ``total`` is that of a request, the others are those of each attempt."""

    connect: float = 5.0
    first_token: float = 300.0
    """From sending the request to the first event with tokens, or the body's first byte."""
    event: float = 60.0
    """Between two reads of the reply, once it has started."""
    total: float = 3600.0
