"""What tokens cost: ``currency``, and ``prices`` under ``models`` of the endpoints file.

A price is per million tokens, with six decimals at most, so a token costs a whole number of trillionths. The
cost of a request is exact, then rounded to a billionth, and from there on whole: sums of costs do not drift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.gateway.requests.name_table import NameTable
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.responses.token_usage import CountedTokens

Currency = Annotated[str, Meta(pattern=r"^[A-Z]{3}\Z")]
DECIMALS = 6
MAX_PRICE = 10**9
"""Per million tokens. It bounds what one wrong report of a server costs; no currency in use needs more."""
NANO = 10**9
"""Costs are billionths of the currency's unit."""
MAX_COST = 10**15
"""Billionths: a million units. A higher cost is a wrong report of a server, as prices are bounded."""
REMEMBERED = 1024
"""Models of which the prices are remembered: clients can invent names."""


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices of a model per million tokens, in units of the file's currency."""

    input: Decimal
    output: Decimal
    cached: Decimal | None = None
    """Of input tokens that were in the server's cache; None: as others."""
    reasoning: Decimal | None = None
    """Of output tokens that the client may not see; None: as others."""


class _TokenPrices(msgspec.Struct, frozen=True):
    """Trillionths per token."""

    input: int
    cached: int
    output: int
    reasoning: int


def check_prices(where: str, prices: Prices) -> None:
    """Raises ValueError; ``where`` is the place in the file."""
    for name in prices.__struct_fields__:
        price = getattr(prices, name)
        if price is None:
            continue
        if not (price.is_finite() and 0 <= price <= MAX_PRICE and price == round(price, DECIMALS)):
            raise ValueError(
                f"{where}.{name}: {price} is not allowed; a price per million tokens is from 0 to "
                f"{MAX_PRICE}, with {DECIMALS} decimals at most"
            )


@dataclass(slots=True)
class Pricing:
    """The prices that hold now, for all requests of a gateway."""

    currency: str = ""
    """Empty: there are no prices."""
    _table: NameTable[_TokenPrices] = field(default_factory=lambda: NameTable({}))

    def update(self, currency: str, prices: Mapping[str, Prices]) -> None:
        """These prices hold from here on, by the names or patterns of models."""
        self.currency = currency if prices else ""
        self._table = NameTable({name: _per_token(each) for name, each in prices.items()})
        _find.cache_clear()

    def set_cost(self, record: RequestRecord) -> None:
        """Set the cost of a request that has ended, unless it is set already: prices may change meanwhile.
        One that reads what was generated before costs nothing."""
        if record.cost is None and self.currency and not record.is_replay:
            counts = record.seen.tokens
            if any(counts):
                record.cost = self.cost(record, counts)
                record.currency = self.currency if record.cost is not None else ""

    def cost(self, record: RequestRecord, counts: CountedTokens) -> int | None:
        """Billionths for these tokens, at the prices of the model that the endpoint gets, or if it has none
        of the one that the client named; None: neither has any."""
        prices = _find(self._table, record.target_model, record.model)
        return None if prices is None else _cost(prices, counts)


@lru_cache(REMEMBERED)
def _find(table: NameTable[_TokenPrices], target_model: str, model: str) -> _TokenPrices | None:
    return table.find(target_model) or table.find(model)


def _per_token(prices: Prices) -> _TokenPrices:
    cached = prices.input if prices.cached is None else prices.cached
    reasoning = prices.output if prices.reasoning is None else prices.reasoning
    return _TokenPrices(
        *(int(each * 10**DECIMALS) for each in (prices.input, cached, prices.output, reasoning))
    )


def _cost(prices: _TokenPrices, counts: CountedTokens) -> int:
    """Cached and reasoning tokens are parts of input and output; a wrong report may say otherwise."""
    given, output = counts.input or 0, counts.output or 0
    cached, reasoning = min(counts.cached or 0, given), min(counts.reasoning or 0, output)
    trillionths = (
        (given - cached) * prices.input
        + cached * prices.cached
        + (output - reasoning) * prices.output
        + reasoning * prices.reasoning
    )
    return min((trillionths + 500) // 1000, MAX_COST)


def as_decimal(billionths: int) -> str:
    """An amount of money as a decimal number, exactly: ``0.0012``."""
    whole, rest = divmod(billionths, NANO)
    return f"{whole}.{rest:09}".rstrip("0").rstrip(".")
