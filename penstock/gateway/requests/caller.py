"""Who sends a request, and what the operator grants to that client."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

MINUTE_S, DAY_S = 60.0, 86_400.0


@dataclass(frozen=True, slots=True)
class Budget:
    """An amount per period. It refills continuously, up to the amount."""

    name: str
    """Name of the budget in the keys file, such as ``tokens-per-minute``."""
    amount: int
    period_s: float

    @property
    def unit(self) -> str:
        """``requests``, ``tokens``, ``input-tokens`` or ``output-tokens``."""
        return self.name.rpartition("-per-")[0]


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
