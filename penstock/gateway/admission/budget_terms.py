"""Budgets as the clients' file names them: of a key, of a team, and of a model for all clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.gateway.billing.prices import NANO, as_decimal
from penstock.gateway.requests.caller import Budget, Caller

Amount = Annotated[int, Meta(gt=0, le=1 << 53)]
MAX_MONEY = 10**6 * Decimal(9)
"""As many billionths as amounts of other kinds may have."""
KeyName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z")]
Pattern = Annotated[str, Meta(min_length=1, max_length=256)]
_BETWEEN = "\n"
"""Between the parts of an owner's name, as no name of a client has it."""


class PeriodTerms(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """Amounts per period. Those of ``cost`` are units of the currency of the prices."""

    requests_per_minute: Amount | None = None
    requests_per_hour: Amount | None = None
    requests_per_day: Amount | None = None
    requests_per_month: Amount | None = None
    tokens_per_minute: Amount | None = None
    tokens_per_hour: Amount | None = None
    tokens_per_day: Amount | None = None
    tokens_per_month: Amount | None = None
    input_tokens_per_minute: Amount | None = None
    input_tokens_per_hour: Amount | None = None
    input_tokens_per_day: Amount | None = None
    input_tokens_per_month: Amount | None = None
    output_tokens_per_minute: Amount | None = None
    output_tokens_per_hour: Amount | None = None
    output_tokens_per_day: Amount | None = None
    output_tokens_per_month: Amount | None = None
    cost_per_minute: Decimal | None = None
    cost_per_hour: Decimal | None = None
    cost_per_day: Decimal | None = None
    cost_per_month: Decimal | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for name, amount in self._amounts():
            if isinstance(amount, Decimal) and not (
                amount.is_finite() and 0 < amount <= MAX_MONEY and amount * NANO == int(amount * NANO)
            ):
                raise ValueError(
                    f"{name} is {amount}; it takes an amount of money above 0, up to {MAX_MONEY}, with nine "
                    "decimals at most"
                )

    def budgets(self, owner: str = "", model: str = "") -> tuple[Budget, ...]:
        """The budgets; ``owner`` shares them with others, and they hold for models that fit ``model``."""
        return tuple(
            Budget.named(name, int(amount * NANO) if isinstance(amount, Decimal) else amount, owner, model)
            for name, amount in self._amounts()
        )

    def _amounts(self) -> Iterable[tuple[str, int | Decimal]]:
        for name, written in zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True):
            amount = getattr(self, name)
            if amount is not None and "-per-" in written:
                yield written, amount


class BudgetTerms(PeriodTerms, rename="kebab", forbid_unknown_fields=True):
    """Those of one client."""

    concurrent_requests: Amount | None = None


ModelTerms = dict[Pattern, PeriodTerms]
"""Amounts by name or pattern of models. Models that fit a pattern share them."""


class TeamEntry(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """What all clients of a team have together."""

    name: KeyName
    budgets: PeriodTerms = msgspec.field(default_factory=PeriodTerms)
    model_budgets: ModelTerms = {}


def budgets_by_model(terms: Mapping[str, PeriodTerms], owner: str) -> tuple[Budget, ...]:
    """The budgets that ``owner`` has for models."""
    return tuple(
        budget
        for pattern, each in terms.items()
        for budget in each.budgets(f"{owner}{_BETWEEN}model{_BETWEEN}{pattern}", pattern)
    )


@dataclass(frozen=True, slots=True)
class SharedBudgets:
    """Budgets that several clients have together."""

    teams: Mapping[str, tuple[Budget, ...]] = field(default_factory=dict)
    models: tuple[Budget, ...] = ()

    @classmethod
    def read(cls, teams: Iterable[TeamEntry], models: Mapping[str, PeriodTerms]) -> SharedBudgets:
        """Raises ValueError."""
        found: dict[str, tuple[Budget, ...]] = {}
        for team in teams:
            if team.name in found:
                raise ValueError(f"the team {team.name!r} is given twice")
            owner = f"{_BETWEEN}team{_BETWEEN}{team.name}"
            found[team.name] = team.budgets.budgets(owner) + budgets_by_model(team.model_budgets, owner)
        return cls(found, budgets_by_model(models, ""))

    def added_to(self, caller: Caller) -> Caller:
        """The client with these budgets."""
        shared = self.teams.get(caller.team, ()) + self.models
        return replace(caller, budgets=caller.budgets + shared) if shared else caller


NOT_SHARED = SharedBudgets()
"""There are none."""


def in_words(budgets: Iterable[Budget], client: str) -> dict[str, int | str]:
    """Amounts by names, which say whose a budget is unless it is the client's alone, for all models. Money is
    in units of the currency."""
    told: dict[str, int | str] = {}
    for budget in budgets:
        shared = budget.owner or budget.model
        name = f"{budget.name} of {owner_in_words(budget, client)}" if shared else budget.name
        told[name] = as_decimal(budget.amount) if budget.unit == "cost" else budget.amount
    return told


def owner_in_words(budget: Budget, client: str) -> str:
    """Whose budget it is, as ``client`` is told."""
    name, *further = budget.owner.split(_BETWEEN, 3)
    model = f"the model {budget.model!r}"
    if not name and further[:1] == ["model"]:
        return model
    whose = f"the team {further[1]!r}" if further[:1] == ["team"] else f"the key {client!r}"
    return f"{whose} and {model}" if budget.model else whose
