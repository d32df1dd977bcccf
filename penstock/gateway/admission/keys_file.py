"""A key of the clients' file: with name, times, priority, share, models and budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.config.describe import Key
from penstock.gateway.admission.budget_terms import (
    BudgetTerms,
    KeyName,
    ModelTerms,
    Pattern,
    budgets_by_model,
)
from penstock.gateway.requests.caller import Caller
from penstock.http.access_keys import key_digest

Digest = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
Time = Annotated[datetime, Meta(tz=True)]


@dataclass(frozen=True, slots=True)
class Grant:
    """Whose a key is, and when it is good. Times are Unix times, in seconds."""

    caller: Caller
    begins: float = -math.inf
    expires: float = math.inf
    revoked: bool = False

    def refusal(self, now: float) -> str:
        """``revoked``, ``expired``, ``not_yet_valid``, or empty: it is good."""
        if self.revoked:
            return "revoked"
        if now >= self.expires:
            return "expired"
        return "not_yet_valid" if now < self.begins else ""


class _Previous(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A key that was replaced."""

    sha256: Digest
    expires: Time


class KeyEntry(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A client, as the file names it."""

    name: KeyName
    key: Key | list[Key] | UnsetType = UNSET
    sha256: Digest | list[Digest] | UnsetType = UNSET
    team: KeyName = ""
    not_before: Time | None = None
    expires: Time | None = None
    revoked: bool = False
    previous: list[_Previous] = []
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    models: list[Pattern] = []
    budgets: BudgetTerms = msgspec.field(default_factory=BudgetTerms)
    model_budgets: ModelTerms = {}

    def caller(self) -> Caller:
        return Caller(
            id=self.name,
            name=self.name,
            team=self.team,
            priority=self.priority,
            weight=self.weight,
            models=tuple(self.models),
            budgets=self.budgets.budgets() + budgets_by_model(self.model_budgets, self.name),
            most_concurrent=self.budgets.concurrent_requests,
        )

    def digests(self) -> list[bytes]:
        """SHA-256 of each of its keys, but for the previous ones."""
        keys, digests = _listed(self.key), _listed(self.sha256)
        return [key_digest(key) for key in keys] + [bytes.fromhex(each) for each in digests]

    def grants(self) -> list[tuple[bytes, Grant]]:
        """Every key of the client, by its digest. Raises ValueError."""
        begins = -math.inf if self.not_before is None else self.not_before.timestamp()
        expires = math.inf if self.expires is None else self.expires.timestamp()
        if expires <= begins:
            raise ValueError(f"{self.name}: expires is not after not-before, so no key would ever be valid")
        now = Grant(self.caller(), begins, expires, self.revoked)
        found = [(digest, now) for digest in self.digests()]
        for each in self.previous:
            end = min(expires, each.expires.timestamp())
            found.append((bytes.fromhex(each.sha256), Grant(now.caller, begins, end, self.revoked)))
        return found


def _listed(value: str | list[str] | UnsetType) -> list[str]:
    if value is UNSET:
        return []
    return [value] if isinstance(value, str) else value
