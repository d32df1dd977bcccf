"""Endpoints that have said when to come back: they get no requests before."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

from penstock.gateway.upstream.exchange import Headers

MAX_BACKOFF_S = 60.0
"""Seconds for which an endpoint is believed at most: a wrong clock or header takes it out no longer."""
MAX_CLIENTS = 64
"""Clients of an endpoint that are told apart."""


_EVERYONE = "*"
"""In the place of a client; no name of a key, and no address."""


@dataclass(slots=True)
class Backoff:
    """Until when one endpoint wants no requests. Times are seconds of any monotonic clock.

    503 and 529 are about the endpoint. 429 may be about the client alone, whose key the endpoint may know. So
    only that client backs off, until another one is refused as well. And an endpoint of several models may
    have a limit for each: there it is about the model of the request.
    """

    until: float = 0.0
    """For everyone."""
    status: int = 503
    """Status of replies to clients meanwhile: 429 if that was answered last, else 503."""
    clients: dict[tuple[str, str], float] = field(default_factory=dict)
    """Until when, by client and model, beyond :attr:`until`; model "": for all models."""
    on_change: Callable[[], None] = lambda: None

    def refused(self, status: int, wait_s: float, client: str, now: float, model: str = "") -> None:
        """The endpoint has answered ``client`` with this status, to come back in ``wait_s`` seconds.
        ``model``: that of the request if the endpoint has several."""
        until = now + min(wait_s, MAX_BACKOFF_S)
        self.status = 429 if status == 429 else 503
        for other in [other for other, at in self.clients.items() if at <= now]:
            del self.clients[other]
        if status != 429:
            self._hold_for_everyone(until, "")
        elif not model or len(self.clients) < MAX_CLIENTS:
            same = {other for other, of in self.clients if of == model}
            if same <= {client} and len(self.clients) < MAX_CLIENTS:
                self._hold(client, model, until)
            else:
                self._hold_for_everyone(until, model)
        self.on_change()

    def clear(self) -> None:
        """Whatever the endpoint has said does not hold any more."""
        self.until = 0.0
        self.clients.clear()
        self.on_change()

    def _hold_for_everyone(self, until: float, model: str) -> None:
        held = {key: at for key, at in self.clients.items() if not model or key[1] == model}
        for key in held:
            del self.clients[key]
        latest = max(until, *held.values(), 0.0)
        if model:
            self._hold(_EVERYONE, model, latest)
        else:
            self.until = max(self.until, latest)

    def _hold(self, client: str, model: str, until: float) -> None:
        self.clients[client, model] = max(until, self.clients.get((client, model), 0.0))

    def until_for(self, client: str, model: str) -> float:
        """Until when it wants no requests of the client for the model."""
        clients = self.clients
        if not clients:
            return self.until
        keys = ((client, ""), (client, model), (_EVERYONE, model))
        return max(self.until, *(clients.get(key, 0.0) for key in keys))


def read_retry_after(headers: Headers, wall_clock: float) -> float | None:
    """Seconds of ``retry-after-ms`` or ``retry-after`` (RFC 9110 §10.2.3); None: neither has a valid value,
    or there is nothing to wait for. ``wall_clock``: seconds since the epoch."""
    values = dict(headers)
    text = values.get(b"retry-after", b"")
    if (milliseconds := _number(values.get(b"retry-after-ms", b""))) is not None:
        seconds = milliseconds / 1000.0
    elif (number := _number(text)) is not None:
        seconds = number
    else:
        try:
            seconds = parsedate_to_datetime(text.decode("latin-1")).timestamp() - wall_clock
        except (ValueError, OverflowError):
            return None
    return seconds if seconds > 0.0 else None


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value < math.inf else None
