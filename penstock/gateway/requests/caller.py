"""Who sends a request, and what the operator grants to that client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

PERIODS_S = {"minute": 60.0, "hour": 3600.0, "day": 86_400.0, "month": 0.0}
"""Periods by the names that budgets end with; 0: the calendar month, in UTC."""


@dataclass(frozen=True, slots=True)
class Budget:
    """An amount per period. It refills continuously, up to the amount; that of a month is full when the month
    begins."""

    name: str
    """Name of the budget in the keys file, such as ``tokens-per-minute``."""
    amount: int
    """Requests, tokens, or billionths of the currency's unit."""
    period_s: float
    """0: the calendar month."""
    owner: str = ""
    """Whose it is, if it is not the client's alone."""
    model: str = ""
    """Name or pattern of the models for which it holds; empty: for all."""
    unit: str = field(init=False, compare=False, repr=False)
    """``requests``, ``tokens``, ``input-tokens``, ``output-tokens`` or ``cost``."""
    is_monthly: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", self.name.rpartition("-per-")[0])
        object.__setattr__(self, "is_monthly", not self.period_s)

    @staticmethod
    @lru_cache(maxsize=4096)
    def named(name: str, amount: int, owner: str = "", model: str = "") -> Budget:
        """A budget whose period is that of its name."""
        return Budget(name, amount, PERIODS_S[name.rpartition("-per-")[2]], owner, model)

    def remaining(self, debt: float) -> int:
        """What is left of it, by its state in the store."""
        used = debt if self.is_monthly else self.amount * debt / self.period_s
        return max(0, int(self.amount - used))

    def holds_for(self, models: Sequence[str]) -> bool:
        """Whether it holds for a request that has one of these names of models."""
        return not self.model or any(fnmatchcase(name, self.model) for name in models)


@dataclass(frozen=True, slots=True)
class Caller:
    """One client."""

    id: str = ""
    """The name of its key; or that key's tenant, if the key has no name; or an address; empty: unknown."""
    name: str = ""
    """The name of its key; empty: the key has none."""
    team: str = ""
    """The team of its key; empty: none is known."""
    label: str = ""
    """What metrics call it; empty: by its name."""
    priority: int | None = None
    """The highest priority of its requests; None: 0, and nothing else limits it."""
    weight: float = 1.0
    """Share of the client, beside others of the same priority."""
    models: tuple[str, ...] = ()
    """Patterns of the models it may use; empty: all."""
    budgets: tuple[Budget, ...] = ()
    most_concurrent: int | None = None
    """Requests at a time; None: no limit."""

    @property
    def is_limited(self) -> bool:
        return bool(self.budgets) or self.most_concurrent is not None

    def may_use(self, model: str) -> bool:
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)

    def priority_of(self, asked: int) -> int:
        """The priority of a request that asks for one."""
        return min(asked, 0) if self.priority is None else min(asked or self.priority, self.priority)


ANYONE = Caller()
