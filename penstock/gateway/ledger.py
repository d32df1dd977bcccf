"""Where a request that has ended is counted and logged, once."""

import json
import logging
from dataclasses import dataclass
from typing import Literal

from .metrics import GatewayMetrics
from .outcome import GOOD
from .relay import Record

access = logging.getLogger("penstock.gateway.access")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Of one gateway; ``wanted`` is its ``--access-log``."""

    metrics: GatewayMetrics
    wanted: Literal["none", "errors", "all"]

    def open(self, record: Record) -> None:
        """A request has come."""
        self.metrics.began(record)

    def leave(self, record: Record) -> None:
        """The request keeps nobody busy any more; how it ended may be told later."""
        self.metrics.left(record)

    def close(self, record: Record) -> None:
        """The request has ended, and it is known how."""
        self.metrics.count(record)
        if self.wanted == "all" or (self.wanted == "errors" and record.outcome not in GOOD):
            _log(record)


def _log(record: Record) -> None:
    usage = record.seen.usage
    line = {
        "request_id": record.request_id or None,
        "path": record.path,
        "model": record.model or None,
        "target_model": None if record.target_model == record.model else record.target_model,
        "outcome": record.outcome,
        "reason": record.reason,
        "status": record.status,
        "endpoint": record.endpoint,
        "attempts": record.attempts,
        "seconds": round(record.ended_at - record.began_at, 4),
        "ttft": _difference(record.seen.first_token_at, record.began_at),
        "input_tokens": usage and usage.input_tokens,
        "output_tokens": usage and usage.output_tokens,
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
    }
    access.info("%s", json.dumps({key: value for key, value in line.items() if value is not None}))


def _difference(later: float | None, earlier: float) -> float | None:
    return None if later is None else round(later - earlier, 4)
