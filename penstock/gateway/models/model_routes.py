"""What a model name that clients send stands for: other models by weight, fallbacks and shadows.

``--model-rewrite``, ``--model-fallback``, ``--model-shadow`` and ``models`` of the endpoints file say so. The
names on the right are pools or models.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import msgspec

from penstock.config.errors import ConfigError, Problems
from penstock.gateway.requests.name_table import NameTable


class ModelRoute(msgspec.Struct, frozen=True, kw_only=True):
    """What one name stands for."""

    targets: Mapping[str, float] = {}
    """Pools or models in the place of the name, with their weights; empty: the name itself."""
    fallback: tuple[str, ...] = ()
    """Pools or models, in this order, when no endpoint of a target is ready, or all refuse."""
    shadow: Mapping[str, float] = {}
    """Pools or models that also get a share of the requests, from 0 to 1; their replies are discarded."""


def check_route(option: str, name: str, route: ModelRoute) -> None:
    """Raises ValueError; ``option`` is where the route was given."""
    for target, weight in route.targets.items():
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"{option}: the weight {weight:g} of {target} is not allowed; it must be finite and "
                "at least 0"
            )
    if route.targets and not any(route.targets.values()):
        raise ValueError(f"{option}: all weights are 0")
    for target, share in route.shadow.items():
        if not 0 < share <= 1:
            raise ValueError(
                f"{option}: the share {share:g} of {target} is not allowed; it must be above 0 and at most 1"
            )
    if sum(route.shadow.values()) > 1:
        raise ValueError(f"{option}: the shares are more than 1 together")
    if name in route.fallback:
        raise ValueError(f"{option}: its fallback is itself")


class ModelRouteTable:
    """Routes by name or pattern; an exact name comes first, then the first pattern that fits."""

    def __init__(self, routes: Mapping[str, ModelRoute], rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._table = NameTable(routes)
        self.all, self.exact, self.find_route = routes, self._table.exact, self._table.find
        self._draws = {
            id(route): (list(route.targets), list(accumulate(route.targets.values())))
            for route in routes.values()
            if route.targets
        }
        """Routes by their id, which lives as long as this object."""

    def draw(self, route: ModelRoute, name: str, session: str | None) -> str:
        """The target for a request: always the same one for a session, as long as the weights stay."""
        draw = self._draws.get(id(route))
        if draw is None:
            return name
        targets, sums = draw
        at = self._rng.random() if session is None else _fraction(name, session)
        return targets[min(bisect_right(sums, at * sums[-1]), len(targets) - 1)]

    def pairs(self) -> Iterable[tuple[str, str]]:
        """Every pair of an exact name and one of its targets."""
        return [(name, target) for name, route in self.exact.items() for target in route.targets or (name,)]

    def shadow_of(self, route: ModelRoute) -> str | None:
        """The shadow that a request is sent to as well; None: this one to none."""
        at = self._rng.random()
        for target, share in route.shadow.items():
            at -= share
            if at < 0:
                return target
        return None


def _fraction(name: str, session: str) -> float:
    """A number from 0 to 1, equal in all gateway processes and at all times."""
    digest = hashlib.blake2b(f"{name}\0{session}".encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest) / (1 << 64)


# -- options


def read_routes(
    rewrites: Sequence[str], fallbacks: Sequence[str], shadows: Sequence[str]
) -> dict[str, ModelRoute]:
    """The routes of ``--model-rewrite``, ``--model-fallback`` and ``--model-shadow``. Raises ConfigError."""
    fields: dict[str, dict[str, object]] = {}
    problems = Problems()
    for field, option, texts in (
        ("targets", "--model-rewrite", rewrites),
        ("fallback", "--model-fallback", fallbacks),
        ("shadow", "--model-shadow", shadows),
    ):
        for text in texts:
            with problems.collected():
                _read_route(fields, field, option, text)
    problems.raise_all()
    return {name: msgspec.convert(said, ModelRoute) for name, said in fields.items()}


def _read_route(fields: dict[str, dict[str, object]], field: str, option: str, text: str) -> None:
    """Add what one value of an option says to the ``fields`` of its name. Raises ConfigError, ValueError."""
    name, _, said = text.partition("=")
    before = fields.setdefault(name, {})
    if field in before:
        raise ConfigError(f"{option} {text}: {name} has one already; give all its models at once")
    models = said.split(",")
    before[field] = tuple(models) if field == "fallback" else _read_weights(models, f"{option} {text}")
    check_route(f"{option} {text}", name, msgspec.convert(before, ModelRoute))


def _read_weights(texts: Iterable[str], option: str) -> dict[str, float]:
    """The weights in ``texts``, MODEL or MODEL:WEIGHT each. Raises ConfigError."""
    weights: dict[str, float] = {}
    for text in texts:
        model, weight = _split_weight(text)
        if model in weights:
            raise ConfigError(f"{option}: {model} is given twice")
        weights[model] = parse_weight(weight, option)
    return weights


def _split_weight(text: str) -> tuple[str, str]:
    """A model and its weight: a number after the last colon, as names may have colons (``qwen3:0.6b``)."""
    model, _, weight = text.rpartition(":")
    return (model, weight) if model and _NUMBER.fullmatch(weight) else (text, "1")


_NUMBER = re.compile("[0-9.]+")


def parse_weight(text: str, option: str) -> float:
    """The weight in ``text``, a part of the value of ``option``. Raises ConfigError."""
    try:
        weight = float(text)
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is not a number") from None
    if not 0 <= weight < math.inf:
        raise ConfigError(f"{option}: the weight {text} is not allowed; it must be finite and at least 0")
    return weight
