"""What becomes of the cost of each request."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gateway.billing.prices import Pricing
from penstock.gateway.billing.request_journal import RequestJournal
from penstock.gateway.responses.request_record import RequestRecord


@dataclass(slots=True)
class Billing:
    """The prices, and the lines of the billing file."""

    pricing: Pricing = field(default_factory=Pricing)
    journal: RequestJournal | None = None
    """None: there is no billing file."""

    def note_sent(self) -> None:
        """See :meth:`RequestJournal.note_sent`."""
        if self.journal is not None:
            self.journal.note_sent()

    def ended(self, record: RequestRecord) -> None:
        """A request has ended with an outcome. Once."""
        if self.pricing.currency:
            self.pricing.set_cost(record)
        if self.journal is not None:
            self.journal.end(record)
