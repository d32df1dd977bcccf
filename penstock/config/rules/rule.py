"""A rule of options, and the message of one that a config breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.config.hidden import HIDDEN
from penstock.config.introspect import options_of

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Rule(Generic[C]):
    """Options that may have other values than their defaults only where a condition holds."""

    options: tuple[str, ...]
    """Fields of the options."""
    allowed: Callable[[C], bool]
    reason: str
    """What the options need or do not go with. ``{0.engine}`` stands for the config's engine."""


def needs(options: str, holds: Callable[[C], bool], reason: str) -> Rule[C]:
    """The rule that ``options``, whose fields are separated by spaces, need what ``holds``."""
    return Rule(tuple(options.split()), holds, reason)


def excludes(options: str, holds: Callable[[C], bool], reason: str) -> Rule[C]:
    """The rule that ``options``, whose fields are separated by spaces, do not go with what ``holds``."""
    return Rule(tuple(options.split()), lambda config: not holds(config), reason)


def check(config: C, rules: Iterable[Rule[C]]) -> None:
    """Raise ValueError for the rules that ``config`` breaks, a line each: the option, its value and the
    reason."""
    options = {option.field: option for option in options_of(type(config))}
    problems: list[str] = []
    for rule in rules:
        for field in rule.options:
            value = getattr(config, field)
            if value != options[field].default and not rule.allowed(config):
                shown = written(field, HIDDEN if options[field].secret else value)
                problems.append(f"{shown}: {rule.reason.format(config)}")
    if problems:
        raise ValueError("\n".join(problems))


def written(field: str, value: Any) -> str:
    """An option as on the command line: ``--headless``, ``--no-web-page``, ``--max-loras 4``."""
    name = field.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
