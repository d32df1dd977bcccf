"""Requests with pictures, from threads: each has a connection and sends one after the other."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Self
from urllib.parse import urlsplit

from penstock.bench.errors import BenchError
from penstock.bench.images.pictures import PATH

REQUEST_S = 60.0
PAUSE_S = 0.05
"""After a failure: a server that restarts is not asked more often."""
DIED = "connection"
"""Outcome of a request whose connection broke, or found no server."""


class Poster:
    """One connection, opened as often as it breaks."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, "servers name theirs"
        self._client = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=REQUEST_S)

    def post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the reply. Raises OSError and http.client.HTTPException."""
        try:
            self._client.request("POST", PATH, body, {"content-type": "application/json"})
            reply = self._client.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException):
            self._client.close()
            raise

    def close(self) -> None:
        self._client.close()


class PictureLoad:
    """Sends requests at once and until it is closed, or ``count`` of them; use it as a context."""

    def __init__(
        self, url: str, body: Callable[[int], bytes], threads: int, *, count: int | None = None
    ) -> None:
        """``body``: that of each request, by its number."""
        self._url, self._body, self._count = url, body, count
        self.outcomes: Counter[str] = Counter()
        """By status of the reply, or :data:`DIED`."""
        self.samples: dict[str, str] = {}
        """A reply for each outcome that is none."""
        self._next = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]

    def __enter__(self) -> Self:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.wait(REQUEST_S)

    def wait(self, seconds: float) -> None:
        """Wait for the last reply. Raises BenchError."""
        end = time.monotonic() + seconds
        for each in self._threads:
            each.join(max(0.0, end - time.monotonic()))
            if each.is_alive():
                self._stop.set()
                raise BenchError(f"requests with pictures have had no reply in {seconds:.0f} s")

    def check(self) -> None:
        """Raises BenchError unless all replies were good."""
        if bad := self.outcomes.keys() - {"200"}:
            told = "; ".join(f"{each}: {self.samples[each]}" for each in sorted(bad))
            raise BenchError(f"requests with pictures failed: {dict(self.outcomes)}: {told}")

    def _take(self) -> int | None:
        with self._lock:
            if self._stop.is_set() or self._next == self._count:
                return None
            self._next += 1
            return self._next - 1

    def _run(self) -> None:
        poster = Poster(self._url)
        while (number := self._take()) is not None:
            try:
                status, reply = poster.post(self._body(number))
                outcome, said = str(status), reply[:300].decode(errors="replace")
            except (OSError, http.client.HTTPException) as error:
                outcome, said = DIED, repr(error)
            with self._lock:
                self.outcomes[outcome] += 1
                self.samples[outcome] = said
            if outcome == DIED:
                time.sleep(PAUSE_S)
        poster.close()
