"""Counts and logs each request once, when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.gateway.billing.billing import Billing
from penstock.gateway.responses.outcome import SUCCESSFUL
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.telemetry.access_log import log_request
from penstock.gateway.telemetry.metrics import GatewayMetrics
from penstock.telemetry.spans import BatchSpanExporter


@dataclass(frozen=True, slots=True)
class RequestRecorder:
    """The recorder of one gateway. ``wanted`` is ``--access-log``, ``log_content`` is ``--log-content``."""

    metrics: GatewayMetrics
    wanted: Literal["none", "errors", "all"]
    spans: BatchSpanExporter[RequestRecord] | None = None
    log_content: bool = False
    billing: Billing | None = None
    """None: nobody pays."""

    def finish(self, record: RequestRecord) -> None:
        """Record a request that has ended with an outcome."""
        if self.billing is not None:
            self.billing.ended(record)
        self.metrics.request_ended(record)
        if self.spans is not None:
            self.spans.add(record)
        if self.wanted == "all" or (self.wanted == "errors" and record.outcome not in SUCCESSFUL):
            log_request(record, with_content=self.log_content)
