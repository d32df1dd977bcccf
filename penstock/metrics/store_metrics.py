"""What one API server counts of the response store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.metrics import families as f
from penstock.metrics.histogram import Histogram
from penstock.metrics.snapshot import Series, histogram_series

REASONS = ("bytes", "ttl")


@dataclass(slots=True)
class StoreMetrics:
    """Counters since the process started."""

    stored: int = 0
    failures: int = 0
    """Writes that failed."""
    removed: Counter[str] = field(default_factory=Counter)
    """Number of removed responses by reason."""
    commit: Histogram = field(default_factory=lambda: Histogram(f.RESPONSE_STORE_COMMIT.bounds))
    background: int = 0
    """Responses that run in the background."""
    entries: int = 0
    bytes: int = 0

    def series(self, server: str) -> Iterator[Series]:
        """The current values."""
        yield Series(f.RESPONSES_STORED.name, (server,), self.stored)
        yield Series(f.RESPONSE_STORE_FAILURES.name, (server,), self.failures)
        for reason in REASONS:
            yield Series(f.RESPONSES_REMOVED.name, (server, reason), self.removed[reason])
        yield histogram_series(f.RESPONSE_STORE_COMMIT, (server,), self.commit)
        yield Series(f.BACKGROUND_RESPONSES.name, (server,), self.background)
        yield Series(f.RESPONSE_STORE_ENTRIES.name, (server,), self.entries)
        yield Series(f.RESPONSE_STORE_BYTES.name, (server,), self.bytes)
