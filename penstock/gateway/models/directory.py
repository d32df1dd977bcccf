"""Which endpoints serve which model, in which pool, and what takes their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal

from penstock.config.errors import did_you_mean
from penstock.gateway.models.model_cards import (
    MAX_MODELS,
    MAX_NAME,
    ModelCard,
    has_several_models,
    is_model_name,
)
from penstock.gateway.models.model_routes import ModelRoute, ModelRouteTable
from penstock.gateway.models.pools import Pool
from penstock.gateway.requests.name_table import NameTable
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.model_steps import FallbackStep
from penstock.http.errors import ApiError, names_in_error, shown

MAX_REMEMBERED = 4096
"""Names whose steps are remembered: clients may invent names."""

UnknownModels = Literal["auto", "refuse", "relay"]


class _PoolOfEndpoints:
    """A pool with its endpoints and what they list."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.overflow = None if pool.overflow is None else pool.overflow.waiting
        self.endpoints: list[Endpoint] = []
        self.names = NameTable({name: name for name in pool.models or ()})

    def serving(
        self, model: str, listings: Mapping[Endpoint, Mapping[str, ModelCard]]
    ) -> FallbackStep | None:
        """The pool's endpoints for the model; None: it is not known to serve it. Of a pool that is told which
        models it serves these are all. Otherwise those that list it, with those that list nothing, which may
        serve any: endpoints of a pool are alike."""
        if self.pool.models is not None:
            if self.names.find(model) is None:
                return None
            any_model = tuple(self.endpoints)
            return FallbackStep(model, any_model, frozenset(any_model), (self.pool.name,), self.overflow)
        listed = frozenset(each for each in self.endpoints if model in listings.get(each, ()))
        if not listed:
            return None
        silent = frozenset(each for each in self.endpoints if listings.get(each) == {})
        endpoints = tuple(each for each in self.endpoints if each in listed | silent)
        return FallbackStep(model, endpoints, listed, (self.pool.name,), self.overflow)

    def by_model(
        self, listings: Mapping[Endpoint, Mapping[str, ModelCard]]
    ) -> Iterator[tuple[str, tuple[Endpoint, ...]]]:
        """The pool's models, each with the endpoints for it; those that list none, if it has no models."""
        names = self.pool.models
        if names is None:
            names = list(dict.fromkeys(name for each in self.endpoints for name in listings.get(each, ())))
        for name in names:
            step = self.serving(name, listings)
            yield name, () if step is None else step.endpoints
        if not names and self.endpoints:
            yield "", tuple(self.endpoints)

    def only_model(self, listings: Mapping[Endpoint, Mapping[str, ModelCard]]) -> str | None:
        """The one model that it serves, adapters and aliases apart; None: there are several, or none."""
        if self.pool.models is not None:
            return next(iter(self.names.exact)) if len(self.names.exact) == 1 else None
        bases = {
            name
            for each in self.endpoints
            for name, card in listings.get(each, {}).items()
            if not card.get("parent")
        }
        return bases.pop() if len(bases) == 1 else None


class ModelDirectory:
    """Answers for a model: the endpoints to try, step by step. Changes with endpoints, listings and routes;
    what is asked in between is remembered."""

    def __init__(self, unknown: UnknownModels = "auto") -> None:
        """``unknown``: what becomes of requests for models that no endpoint lists. ``auto``: they are refused
        if models differ between endpoints; otherwise the endpoints decide."""
        self.generation = 0
        """Counts the updates."""
        self._unknown = unknown
        self._routes = ModelRouteTable({})
        self._endpoints: tuple[Endpoint, ...] = ()
        self._own: tuple[Endpoint, ...] = ()
        """The endpoints without those of hosted APIs, unless all are: these get only requests that are known
        to be for them."""
        self._any_model = FallbackStep("", ())
        self._pools: dict[str, _PoolOfEndpoints] = {}
        self._listings: dict[Endpoint, Mapping[str, ModelCard]] = {}
        """Missing: not read yet; empty: the endpoint does not list models."""
        self._steps: dict[tuple[str, str], tuple[FallbackStep, ...]] = {}
        """Steps by the name that was asked for and its target."""
        self._undecided: tuple[Endpoint, ...] | None = None
        """Endpoints for models that no endpoint lists; empty: there are none; None: to be found."""
        self._by_model: dict[tuple[str, str], tuple[Endpoint, ...]] | None = None
        self._names: NameTable[str] | None = None
        """Names of models that are listed or configured, and patterns."""

    # -- changes

    def update(
        self,
        endpoints: Iterable[Endpoint],
        pools: Iterable[Pool] = (),
        routes: Mapping[str, ModelRoute] | None = None,
    ) -> None:
        """Replace the endpoints, each in the pool of its name, the pools and the routes."""
        self._routes = ModelRouteTable(routes or {})
        self._endpoints = tuple(endpoints)
        self._own = tuple(each for each in self._endpoints if not each.upstream.hosted) or self._endpoints
        self._any_model = FallbackStep("", self._own)
        self.generation += 1
        self._pools = {pool.name: _PoolOfEndpoints(pool) for pool in pools}
        self._listings = {each: cards for each, cards in self._listings.items() if each in self._endpoints}
        for endpoint in self._endpoints:
            name = endpoint.pool
            if name not in self._pools:
                self._pools[name] = _PoolOfEndpoints(Pool(name=name))
            self._pools[name].endpoints.append(endpoint)
        self._forget()

    def learn(self, endpoint: Endpoint, cards: Mapping[str, ModelCard]) -> None:
        """What the endpoint lists; empty: it does not list models."""
        before = self._listings.get(endpoint)
        self._listings[endpoint] = cards
        endpoint.several_models = has_several_models(cards)
        if before is None or before.keys() != cards.keys():
            self._forget()

    def add_adapters(self, endpoint: Endpoint, names: Iterable[str]) -> bool:
        """Models that the endpoint serves although it did not list them; return whether there are any."""
        listed = self._listings.get(endpoint)
        if not listed:
            return False
        new = (name for name in names if name not in listed and is_model_name(name))
        more = list(islice(new, max(0, MAX_MODELS - len(listed))))
        if not more:
            return False
        parent = next(iter(listed))
        self.learn(endpoint, {**listed, **{name: {"id": name, "parent": parent} for name in more}})
        return True

    def _forget(self) -> None:
        self._steps.clear()
        self._undecided = None
        self._by_model = self._names = None

    def unserved(self) -> list[str] | None:
        """Names of targets, fallbacks and shadows that nobody serves, in words; None: that is not known until
        all endpoints were read."""
        open_pools = [pool for pool in self._pools.values() if pool.pool.models is None]
        listings = [self._listings.get(each) for pool in open_pools for each in pool.endpoints]
        if None in listings or not self._endpoints:
            return None
        if self._unknown == "relay" or {} in listings:
            return []
        return [
            f"{what} {name!r} of {whose}: no pool has this name, and no endpoint serves such a model"
            + self._hint(name)
            for whose, what, name in self.stand_ins()
            if name not in self._pools
            and all(pool.serving(name, self._listings) is None for pool in self._pools.values())
        ]

    def _hint(self, name: str) -> str:
        if name in self._routes.exact:
            return "; it stands for others itself, but names are replaced once"
        names = (each for each in (*self._pools, *self.models()) if each and each not in self._routes.exact)
        return did_you_mean(name, names)

    def names_model(self, name: str) -> bool:
        """Whether a pool is said to serve a model of this name."""
        return any(
            pool.pool.models is not None and pool.serving(name, {}) is not None
            for pool in self._pools.values()
        )

    def stand_ins(self) -> Iterator[tuple[str, str, str]]:
        """The names that stand in for others: whose, as what, and the name."""
        for name, route in self._routes.all.items():
            for what, names in (
                ("target", route.targets),
                ("fallback", route.fallback),
                ("shadow", route.shadow),
            ):
                yield from ((repr(name), what, each) for each in names)
        for pool in self._pools.values():
            yield from ((f"pool {pool.pool.name}", "fallback", each) for each in pool.pool.fallback)

    def by_model(self) -> Mapping[tuple[str, str], tuple[Endpoint, ...]]:
        """The endpoints that serve a model, by model and pool; the model is empty for pools of which no
        endpoint lists any. Patterns are as configured."""
        if self._by_model is None:
            self._by_model = {
                (model, name): endpoints
                for name, pool in self._pools.items()
                for model, endpoints in pool.by_model(self._listings)
            }
        return self._by_model

    def listed_name(self, model: str) -> str | None:
        """The name or pattern by which a model is configured, or listed by an endpoint; empty: others are,
        and it is not; None: there are no names at all."""
        if self._names is None:
            names = {*self._routes.all, *(name for name, _ in self.by_model()), *self._pools} - {""}
            self._names = NameTable({name: name for name in names})
        return self._names.find(model) or ("" if self._names.exact else None)

    # -- answers

    def listing(self, endpoint: Endpoint) -> Mapping[str, ModelCard] | None:
        """What the endpoint lists; None: it was not read yet; empty: it does not list models."""
        return self._listings.get(endpoint)

    def pairs(self) -> Iterable[tuple[str, str]]:
        """Every pair of a name and a model that it stands for, as far as the configuration says."""
        return [(name, name if target in self._pools else target) for name, target in self._routes.pairs()]

    def steps(self, asked: str, session: str | None = None) -> tuple[FallbackStep, ...]:
        """The models and endpoints to try for a request that names the model ``asked``, one after the other.
        Raises ApiError if there are none."""
        route = self._routes.find_route(asked)
        return self.steps_to(asked, self._target(route, asked, session), route)

    def target(self, asked: str, session: str | None) -> tuple[str | None, ModelRoute | None, str]:
        """What a name stands for: the name or pattern of its route, the route (both None: it has none), and
        one of the targets."""
        route = self._routes.find_route(asked)
        name = next((name for name, each in self._routes.all.items() if each is route), None)
        return name, route, self._target(route, asked, session)

    def _target(self, route: ModelRoute | None, asked: str, session: str | None) -> str:
        return asked if route is None else self._routes.draw(route, asked, session)

    def steps_to(self, asked: str, target: str, route: ModelRoute | None) -> tuple[FallbackStep, ...]:
        """See :meth:`steps`; target and route are those of :meth:`target`."""
        key = (asked, target)
        steps = self._steps.get(key)
        if steps is None:
            steps = tuple(self._find_steps(asked, target, route))
            if len(asked) <= MAX_NAME:
                if len(self._steps) >= MAX_REMEMBERED:
                    self._steps.clear()
                self._steps[key] = steps
        if not steps:
            raise self._unknown_model(target)
        return steps

    @property
    def any_model(self) -> FallbackStep:
        """For requests that concern no model."""
        return self._any_model

    def step_at(self, endpoints: Sequence[Endpoint], asked: str, session: str | None = None) -> FallbackStep:
        """For a request that only these endpoints can serve: the model that they serve under this name."""
        route = self._routes.find_route(asked)
        drawn = asked if route is None else self._routes.draw(route, asked, session)
        for target in (drawn, *(() if route is None else route.targets)):
            step = self._step_of(target, asked)
            if step is not None and not step.listed.isdisjoint(endpoints):
                return FallbackStep(step.model, self._endpoints)
        return FallbackStep(drawn, self._endpoints)

    def shadow(self, asked: str, target: str) -> tuple[str, FallbackStep | None] | None:
        """The model or pool that a copy of a request is for, and where it goes; None: the request is not
        copied."""
        route = self._routes.find_route(asked)
        if (route is None or not route.shadow) and target != asked:
            route = self._routes.find_route(target)
        if route is None or not route.shadow:
            return None
        name = self._routes.shadow_of(route)
        return None if name is None else (name, self._step_of(name, target))

    def models(self) -> dict[str, ModelCard]:
        """All models that can be asked for by name. Empty: no endpoint lists any."""
        found: dict[str, ModelCard] = {}
        for pool in self._pools.values():
            if pool.pool.models is not None:
                for name in pool.names.exact:
                    found.setdefault(name, self._card(name, pool))
            else:
                for endpoint in pool.endpoints:
                    for name, card in self._listings.get(endpoint, {}).items():
                        found.setdefault(name, card)
        if not found:
            return {}
        others = {
            name: self._card_of_route(name, route, found)
            for name, route in self._routes.exact.items()
            if name not in found
        }
        return found | others

    def card(self, name: str) -> ModelCard | None:
        """Describe a model that can be asked for, also by a pattern; None: nobody is known to serve it."""
        cards = self.models()
        if name in cards:
            return cards[name]
        if (route := self._routes.find_route(name)) is not None:
            return self._card_of_route(name, route, cards)
        step = self._step_of(name, name)
        return None if step is None or not step.pools else _renamed(name, step.model, cards)

    # -- steps

    def _find_steps(self, asked: str, target: str, route: ModelRoute | None) -> Iterator[FallbackStep]:
        seen: set[tuple[str, tuple[Endpoint, ...]]] = set()
        first = self._step_of(target, asked)
        found = [step for step in (first, *self._fallbacks(asked, target, route, first)) if step is not None]
        for step in [step for step in found if not self._is_guess(step)] or found:
            if (key := (step.model, step.endpoints)) not in seen:
                seen.add(key)
                yield step

    def _is_guess(self, step: FallbackStep) -> bool:
        """Whether its endpoints list models, but not this one: they get it for want of anything better."""
        return (
            self._unknown == "auto"
            and not step.pools
            and bool(step.endpoints)
            and all(self._listings.get(endpoint) for endpoint in step.endpoints)
        )

    def _fallbacks(
        self, asked: str, target: str, route: ModelRoute | None, first: FallbackStep | None
    ) -> Iterator[FallbackStep | None]:
        """What takes the place of the first step: by the route of the name, else of its target; then by the
        pools of the endpoints."""
        model = target if first is None else first.model
        if (route is None or not route.fallback) and target != asked:
            route = self._routes.find_route(target)
        names = [] if route is None else list(route.fallback)
        names += self._pool_fallbacks((target,) if first is None else first.pools)
        done: set[str] = set()
        for name in names:  # grows
            if name in done:
                continue
            done.add(name)
            step = self._step_of(name, model)
            if step is not None:
                names += self._pool_fallbacks(step.pools)
            yield step

    def _pool_fallbacks(self, pools: Iterable[str]) -> list[str]:
        return [name for pool in pools if pool in self._pools for name in self._pools[pool].pool.fallback]

    def _step_of(self, name: str, asked: str) -> FallbackStep | None:
        """A step for a pool or model. A pool gets the model that was asked for, or its only one."""
        pool = self._pools.get(name)
        if pool is None or not name:
            return self._serving(name)
        if (step := pool.serving(asked, self._listings)) is not None:
            return step
        only = pool.only_model(self._listings)
        if only is not None:
            return pool.serving(only, self._listings)
        silent = [each for each in pool.endpoints if not self._listings.get(each)]
        return (
            FallbackStep(asked, tuple(silent), pools=(name,)) if silent and pool.pool.models is None else None
        )

    def _serving(self, model: str) -> FallbackStep | None:
        """The endpoints for a model, in all pools but those that only stand in for others."""
        found = {
            name: step
            for name, pool in self._pools.items()
            if (step := pool.serving(model, self._listings)) is not None
        }
        if found:
            spare = {name for pool in found for name in self._pools[pool].pool.fallback}
            spare |= self._shadows_of(model)
            steps = [step for name, step in found.items() if name not in spare] or list(found.values())
            if len(steps) == 1:
                return steps[0]
            endpoints = tuple(endpoint for step in steps for endpoint in step.endpoints)
            listed = frozenset(endpoint for step in steps for endpoint in step.listed)
            pools = tuple(pool for step in steps for pool in step.pools)
            limits = [step.overflow for step in steps if step.overflow is not None]
            overflow = max(limits) if len(limits) == len(steps) else None
            return FallbackStep(model, endpoints, listed, pools, overflow)
        undecided = self._find_undecided()
        return FallbackStep(model, undecided) if undecided or not self._endpoints else None

    def _find_undecided(self) -> tuple[Endpoint, ...]:
        """The endpoints of which nothing is known; without any, all of them if they may tell."""
        if self._undecided is None:
            self._undecided = self._list_undecided()
        return self._undecided

    def _list_undecided(self) -> tuple[Endpoint, ...]:
        unlisted = tuple(
            endpoint
            for pool in self._pools.values()
            if pool.pool.models is None
            for endpoint in pool.endpoints
            if not self._listings.get(endpoint) and endpoint in self._own
        )
        if unlisted:
            return unlisted
        relays = self._unknown == "relay" or (self._unknown == "auto" and self._are_alike())
        return self._own if relays else ()

    def _shadows_of(self, model: str) -> set[str]:
        own = self._routes.find_route(model)
        return {
            name
            for route in self._routes.all.values()
            for name in route.shadow
            if name in self._pools and (model in route.targets or route is own)
        }

    def _are_alike(self) -> bool:
        """Whether all endpoints serve the same models, so that any of them can tell what it serves besides:
        names with wildcards, adapters that it loads when they are asked for, or any name at all."""
        if any(pool.pool.models is not None for pool in self._pools.values()):
            return False
        return len({frozenset(cards) for cards in self._listings.values()}) <= 1

    def _card(self, name: str, pool: _PoolOfEndpoints) -> ModelCard:
        for endpoint in pool.endpoints:
            if (card := self._listings.get(endpoint, {}).get(name)) is not None:
                return card
        return {"id": name}

    def _card_of_route(self, name: str, route: ModelRoute, cards: Mapping[str, ModelCard]) -> ModelCard:
        """The card of a name that stands for others: that of the first one that is served."""
        for other in (*route.targets, *route.fallback):
            step = self._step_of(other, name)
            if step is not None and step.pools:
                return _renamed(name, step.model, cards)
        return _renamed(name, next(iter(route.targets), name), cards)

    def _unknown_model(self, model: str) -> ApiError:
        names = sorted(self.models())
        if not model:
            message = f"The request names no model. There are: {names_in_error(names)}."
            return ApiError(400, message, param="model", code="model_not_found")
        message = f"The model `{shown(model)}` does not exist. There are: {names_in_error(names)}."
        return ApiError(404, message, param="model", code="model_not_found")


def _renamed(name: str, model: str, cards: Mapping[str, ModelCard]) -> ModelCard:
    """The card of ``model`` for those who call it ``name``."""
    card = {**cards.get(model, {}), "id": name}
    return card if name == model else {**card, "parent": model}
