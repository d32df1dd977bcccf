"""What one API server counts of pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.metrics import families as f
from penstock.metrics.snapshot import Series
from penstock.wire.media.worker import MediaPrepared

OUTCOMES = ("remembered", "found", "decoded")
STAGES = ("fetch", "decode", "preprocess")


@dataclass(slots=True)
class MediaMetrics:
    """Counters since the process started; seconds are wall time of media workers."""

    images: Counter[str] = field(default_factory=Counter)
    """Pictures of requests by outcome: those that the API server had prepared before or was preparing, those
    that a worker found in the store, and those that it decoded."""
    refused: Counter[str] = field(default_factory=Counter)
    """By reason."""
    lost: int = 0
    """Workers that ended with a picture."""
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """By stage."""
    source_bytes: int = 0
    pixels: int = 0
    cache_bytes: int = 0
    """In the store, when a worker has last told."""

    def prepare(self, prepared: MediaPrepared) -> None:
        """Count what a worker has done."""
        self.images["found" if prepared.found else "decoded"] += 1
        self.seconds = [total + each for total, each in zip(self.seconds, prepared.seconds, strict=True)]
        self.cache_bytes = prepared.pool_bytes
        if not prepared.found:
            self.source_bytes += prepared.source_bytes
            self.pixels += prepared.pixels

    def series(self, server: str) -> Iterator[Series]:
        """The current values."""
        for outcome in OUTCOMES:
            yield Series(f.MEDIA_IMAGES.name, (server, outcome), self.images[outcome])
        for reason, count in self.refused.items():
            yield Series(f.MEDIA_REFUSED.name, (server, reason), count)
        for stage, seconds in zip(STAGES, self.seconds, strict=True):
            yield Series(f.MEDIA_SECONDS.name, (server, stage), seconds)
        yield Series(f.MEDIA_SOURCE_BYTES.name, (server,), self.source_bytes)
        yield Series(f.MEDIA_PIXELS.name, (server,), self.pixels)
        yield Series(f.MEDIA_WORKERS_LOST.name, (server,), self.lost)
        yield Series(f.MEDIA_CACHE_BYTES.name, (server,), self.cache_bytes)
