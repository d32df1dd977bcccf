"""What an API server counts of pictures."""

from __future__ import annotations

from collections import Counter

from penstock.wire.media.worker import MediaPrepared


class MediaCounts:
    """Counters since the process started; seconds are wall time of workers."""

    def __init__(self) -> None:
        self.requests = 0
        """Pictures that requests had."""
        self.remembered = 0
        """Of these, those that this API server had prepared before."""
        self.found = 0
        """Those that a worker found in the store."""
        self.decoded = 0
        """Those that a worker decoded."""
        self.refused: Counter[str] = Counter()
        """By reason."""
        self.lost = 0
        """Workers that ended with a picture."""
        self.seconds = [0.0, 0.0, 0.0]
        """To fetch, to decode and to preprocess."""
        self.source_bytes = 0
        self.pixels = 0
        self.pool_bytes = 0
        """In the store, when a worker has last told."""

    def prepare(self, prepared: MediaPrepared) -> None:
        self.pool_bytes = prepared.pool_bytes
        self.seconds[0] += prepared.seconds[0]
        if prepared.found:
            self.found += 1
            return
        self.decoded += 1
        self.seconds[1] += prepared.seconds[1]
        self.seconds[2] += prepared.seconds[2]
        self.source_bytes += prepared.source_bytes
        self.pixels += prepared.pixels

    def refuse(self, code: str) -> None:
        self.refused[code] += 1
