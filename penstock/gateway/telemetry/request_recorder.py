"""Where a request that has ended is counted and logged, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.gateway.relay.request_record import RequestRecord
from penstock.gateway.responses.outcome import SUCCESSFUL
from penstock.gateway.telemetry.access_log import log_request
from penstock.gateway.telemetry.metrics import GatewayMetrics
from penstock.gateway.telemetry.spans import BatchSpanExporter


@dataclass(frozen=True, slots=True)
class RequestRecorder:
    """Of one gateway; ``wanted`` is its ``--access-log``."""

    metrics: GatewayMetrics
    wanted: Literal["none", "errors", "all"]
    spans: BatchSpanExporter | None = None

    def finish(self, record: RequestRecord) -> None:
        """The request has ended, and it is known how."""
        self.metrics.request_ended(record)
        if self.spans is not None:
            self.spans.add(record)
        if self.wanted == "all" or (self.wanted == "errors" and record.outcome not in SUCCESSFUL):
            log_request(record)
