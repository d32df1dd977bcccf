"""Which endpoints a request for a model may be sent to, and in which order."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from penstock.gateway.models.directory import ModelDirectory
from penstock.gateway.models.model_cards import MAX_MODELS, ModelCard
from penstock.gateway.models.model_figures import model_figures
from penstock.gateway.models.model_routes import ModelRoute
from penstock.gateway.models.pools import Pool
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.model_steps import FallbackStep
from penstock.gateway.upstream.upstream import Upstream
from penstock.http.errors import ApiError


def cards(*names: str) -> dict[str, ModelCard]:
    return {name: {"id": name} for name in names}


class Fleet:
    """A directory of endpoints by their names; ``a/x`` is in the pool ``a``."""

    def __init__(self, *names: str, pools: tuple[Pool, ...] = (), unknown: str = "auto") -> None:
        self.endpoints = {name: Endpoint(f"http://{name}", pool=name.rpartition("/")[0]) for name in names}
        self.directory = ModelDirectory(unknown)  # type: ignore[arg-type]
        self._pools = pools
        self.route({})

    def route(self, routes: dict[str, ModelRoute]) -> None:
        self.directory.update(self.endpoints.values(), self._pools, routes)

    def lists(self, name: str, *models: str) -> None:
        self.directory.learn(self.endpoints[name], cards(*models))

    def steps(self, asked: str, session: str | None = None) -> list[tuple[str, str]]:
        return [self._shown(step) for step in self.directory.steps(asked, session)]

    def _shown(self, step: FallbackStep) -> tuple[str, str]:
        return step.model, " ".join(name for name, each in self.endpoints.items() if each in step.endpoints)

    def refusal(self, asked: str) -> ApiError:
        with pytest.raises(ApiError) as caught:
            self.directory.steps(asked)
        return caught.value


def test_endpoints_by_model() -> None:
    pools = (
        Pool(name="large", models=["big", "claude-*"]),
        Pool(name="small"),
        Pool(name="empty", models=["e"]),
    )
    fleet = Fleet("x", "large/y", "small/z", "small/w", pools=pools)
    fleet.lists("small/z", "m")
    by_model = fleet.directory.by_model()
    assert by_model == fleet.directory.by_model()
    names = {each: name for name, each in fleet.endpoints.items()}
    assert {key: [names[each] for each in found] for key, found in by_model.items()} == {
        ("", ""): ["x"],
        ("big", "large"): ["large/y"],
        ("claude-*", "large"): ["large/y"],
        ("e", "empty"): [],
        ("m", "small"): ["small/z"],
    }
    fleet.lists("small/w")
    assert [names[each] for each in fleet.directory.by_model()["m", "small"]] == ["small/z", "small/w"]
    records = [RequestRecord("", target_model=model, waits=model == "m") for model in ("m", "claude-1", "x")]
    figures = [
        (each.metric.names["own"].name.removeprefix("penstock_gateway_"), each.value, each.labels)
        for each in model_figures(fleet.directory, records)
    ]
    assert figures == [
        ("model_endpoints", 1, {"model": "*"}),
        ("model_ready_endpoints", 1, {"model": "*"}),
        ("model_endpoints", 1, {"model": "big", "pool": "large"}),
        ("model_ready_endpoints", 1, {"model": "big", "pool": "large"}),
        ("model_endpoints", 1, {"model": "claude-*", "pool": "large"}),
        ("model_ready_endpoints", 1, {"model": "claude-*", "pool": "large"}),
        ("model_endpoints", 0, {"model": "e", "pool": "empty"}),
        ("model_ready_endpoints", 0, {"model": "e", "pool": "empty"}),
        ("model_endpoints", 2, {"model": "m", "pool": "small"}),
        ("model_ready_endpoints", 2, {"model": "m", "pool": "small"}),
        ("model_requests_in_flight", 1, {"model": "*"}),
        ("model_queued_requests", 0, {"model": "*"}),
        ("model_requests_in_flight", 0, {"model": "big"}),
        ("model_queued_requests", 0, {"model": "big"}),
        ("model_requests_in_flight", 1, {"model": "claude-*"}),
        ("model_queued_requests", 0, {"model": "claude-*"}),
        ("model_requests_in_flight", 0, {"model": "e"}),
        ("model_queued_requests", 0, {"model": "e"}),
        ("model_requests_in_flight", 1, {"model": "m"}),
        ("model_queued_requests", 1, {"model": "m"}),
        ("model_requests_in_flight", 0, {"model": "other"}),
        ("model_queued_requests", 0, {"model": "other"}),
    ]


def test_listed_names() -> None:
    """Or patterns. Names that nobody lists are told from those that nobody could list."""
    fleet = Fleet("x")
    assert fleet.directory.listed_name("m") is None
    fleet = Fleet("x", "large/y", pools=(Pool(name="large", models=["claude-*"]),))
    assert [fleet.directory.listed_name(name) for name in ("claude-1", "claude-*", "large")] == [
        "claude-*",
        "claude-*",
        "large",
    ]
    fleet.lists("x", "m")
    fleet.route({"chat": ModelRoute(targets={"m": 1})})
    names = [fleet.directory.listed_name(name) for name in ("m", "chat", "claude-1", "invented", "")]
    assert names == ["m", "chat", "claude-*", "", ""]


def test_names_that_nobody_serves() -> None:
    pools = (Pool(name="large", models=["big-*"], fallback=["smal"]), Pool(name="small", fallback=["mini"]))
    fleet = Fleet("x", "small/y", pools=pools)
    fleet.route(
        {
            "chat": ModelRoute(targets={"big-1": 1, "bgi-1": 1}, fallback=("small", "alias")),
            "alias": ModelRoute(targets={"mini": 1}, shadow={"minni": 0.1}),
        }
    )
    fleet.lists("x", "mini")
    assert fleet.directory.unserved() is None, "an endpoint was not read yet"
    fleet.lists("small/y", "other")
    nobody = "no pool has this name, and no endpoint serves such a model"
    assert fleet.directory.unserved() == [
        f"target 'bgi-1' of 'chat': {nobody}",
        f"fallback 'alias' of 'chat': {nobody}; it stands for others itself, but names are replaced once",
        f"shadow 'minni' of 'alias': {nobody}; did you mean mini?",
        f"fallback 'smal' of pool large: {nobody}; did you mean small?",
    ]
    fleet.lists("x")
    assert fleet.directory.unserved() == [], "one that lists nothing may serve any"
    fleet.lists("x", "mini")
    relays = Fleet("x", pools=pools, unknown="relay")
    relays.lists("x", "mini")
    assert relays.directory.unserved() == []


def test_requests_go_to_those_who_list_the_model() -> None:
    fleet = Fleet("x", "y", "z")
    assert fleet.steps("m") == [("m", "x y z")], "nobody was read yet"
    fleet.lists("x", "m")
    fleet.lists("y", "m", "n")
    assert fleet.steps("m") == [("m", "x y")], "those who are known to serve it"
    assert fleet.steps("unheard") == [("unheard", "z")], "who was not read yet may serve it"
    fleet.lists("z", "o")
    assert fleet.steps("n") == [("n", "y")]
    error = fleet.refusal("unheard")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert error.message == "The model `unheard` does not exist. There are: m, n, o."
    fleet.lists("z", "o", "unheard")
    assert fleet.steps("unheard") == [("unheard", "z")], "loaded meanwhile"


def test_hosted_apis_get_what_is_known_to_be_for_them() -> None:
    """Neither files, nor names that clients have invented."""
    fleet = Fleet("own/x", "api/y", "open/z", pools=tuple(Pool(name=name) for name in ("own", "api", "open")))
    for name in ("api/y", "open/z"):
        fleet.endpoints[name].upstream = Upstream(hosted=True)
    fleet.route({"gpt": ModelRoute(targets={"open": 1})})
    fleet.lists("api/y", "a")
    fleet.lists("open/z")
    assert fleet.steps("a") == [("a", "api/y")]
    assert fleet.steps("gpt") == [("gpt", "open/z")]
    assert fleet.steps("b") == [("b", "own/x")]
    assert fleet.directory.any_model.endpoints == (fleet.endpoints["own/x"],)
    del fleet.endpoints["own/x"]
    fleet.route({})
    assert fleet.steps("b") == [("b", "open/z")]
    assert len(fleet.directory.any_model.endpoints) == 2


def test_an_endpoint_that_does_not_list_serves_any_model() -> None:
    fleet = Fleet("x", "y")
    fleet.lists("x", "m")
    fleet.lists("y")
    assert fleet.steps("m") == [("m", "x y")]
    assert fleet.steps("other") == [("other", "y")]


def test_endpoints_that_list_the_same_decide_about_other_names() -> None:
    """They may have names with wildcards, or serve any name."""
    fleet = Fleet("x", "y")
    fleet.lists("x", "m")
    fleet.lists("y", "m")
    assert fleet.steps("gpt-4") == [("gpt-4", "x y")]
    assert fleet.steps("") == [("", "x y")]


@pytest.mark.parametrize(("unknown", "alike", "served"), [("refuse", True, False), ("relay", False, True)])
def test_what_becomes_of_unknown_models(unknown: str, alike: bool, served: bool) -> None:
    fleet = Fleet("x", "y", unknown=unknown)
    fleet.lists("x", "m")
    fleet.lists("y", "m" if alike else "n")
    if served:
        assert fleet.steps("q") == [("q", "x y")]
    else:
        assert fleet.refusal("q").status == 404


def test_a_request_without_a_model_is_refused_where_models_differ() -> None:
    fleet = Fleet("x", "y")
    fleet.lists("x", "m")
    fleet.lists("y", "n")
    error = fleet.refusal("")
    assert (error.status, error.message) == (400, "The request names no model. There are: m, n.")
    assert error.code == "model_not_found", "the reason in metrics and logs"


def test_errors_name_some_models_only() -> None:
    fleet = Fleet("x", "y")
    fleet.lists("x", *(f"m{number:02}" for number in range(40)))
    fleet.lists("y", "n")
    assert fleet.refusal("q").message.endswith("m18, m19 … (41 in all).")


def test_no_endpoint_at_all_is_no_unknown_model() -> None:
    assert Fleet().steps("m") == [("m", "")]


# -- pools


def test_pools_serve_what_they_are_told() -> None:
    fleet = Fleet("a/x", "b/y", "b/z", pools=(Pool(name="a", models=["m", "claude-*"]), Pool(name="b")))
    fleet.lists("a/x", "something-else")
    fleet.lists("b/y", "n")
    assert fleet.steps("m") == fleet.steps("m") == [("m", "a/x")]
    assert fleet.steps("claude-opus") == [("claude-opus", "a/x")]
    assert fleet.steps("n") == [("n", "b/y")]
    fleet.lists("b/z")
    assert fleet.steps("n") == [("n", "b/y b/z")], "endpoints of a pool are alike"
    assert fleet.steps("m") == [("m", "a/x")], "those of others are not"
    assert set(fleet.directory.models()) == {"m", "n"}


def test_a_pool_that_stands_in_gets_requests_only_then() -> None:
    fleet = Fleet("main/x", "spare/y", "third/z", pools=(
        Pool(name="main", fallback=["spare"]), Pool(name="spare", fallback=["third"]), Pool(name="third")
    ))  # fmt: skip
    fleet.lists("main/x", "m")
    fleet.lists("spare/y", "m")
    fleet.lists("third/z", "small")
    assert fleet.steps("m") == [("m", "main/x"), ("m", "spare/y"), ("small", "third/z")]


def test_pools_that_stand_in_for_each_other() -> None:
    fleet = Fleet("a/x", "b/y", pools=(Pool(name="a", fallback=["b"]), Pool(name="b", fallback=["a"])))
    fleet.lists("a/x", "m")
    fleet.lists("b/y", "n")
    assert fleet.steps("m") == [("m", "a/x"), ("n", "b/y")]
    assert fleet.steps("n") == [("n", "b/y"), ("m", "a/x")]


def test_a_pool_of_several_models_stands_in_for_those_it_serves() -> None:
    fleet = Fleet("a/x", "b/y", pools=(Pool(name="a", fallback=["b"]), Pool(name="b")))
    fleet.lists("a/x", "m", "n")
    fleet.lists("b/y", "n", "o")
    assert fleet.steps("n") == [("n", "a/x"), ("n", "b/y")]
    assert fleet.steps("m") == [("m", "a/x")]


def test_an_empty_pool_falls_back() -> None:
    fleet = Fleet("b/y", pools=(Pool(name="a", models=["m"], fallback=["n"]), Pool(name="b")))
    fleet.lists("b/y", "n")
    assert fleet.steps("m") == [("m", ""), ("n", "b/y")]


# -- routes


def test_names_stand_for_others() -> None:
    fleet = Fleet("x", "y")
    fleet.lists("x", "small")
    fleet.lists("y", "large")
    fleet.route(
        {
            "chat": ModelRoute(targets={"small": 9, "large": 1}, fallback=("large",)),
            "claude-*": ModelRoute(targets={"large": 1}),
            "large": ModelRoute(fallback=("small",)),
        }
    )
    drawn = Counter(tuple(fleet.steps("chat", f"session {number}")) for number in range(1000))
    assert set(drawn) == {(("small", "x"), ("large", "y")), (("large", "y"),)}
    assert 60 <= drawn[("large", "y"),] <= 140
    assert len({tuple(fleet.steps("chat", "one session")) for _ in range(50)}) == 1
    assert fleet.steps("claude-opus") == [("large", "y"), ("small", "x")], "the fallback of its target"
    listed = fleet.directory.models()
    assert set(listed) == {"small", "large", "chat"}
    assert listed["chat"] == {"id": "chat", "parent": "small"}


def test_a_target_that_nobody_serves_falls_back() -> None:
    fleet = Fleet("x", "y")
    fleet.lists("x", "small")
    fleet.lists("y", "other")
    fleet.route({"large": ModelRoute(fallback=("gone", "small"))})
    assert fleet.steps("large") == [("small", "x")]
    fleet.route({"large": ModelRoute(fallback=("gone",))})
    assert fleet.refusal("large").code == "model_not_found"


def test_a_name_that_nobody_lists_falls_back_where_endpoints_are_alike() -> None:
    """Without a fallback they would be asked, as they may know more names than they list."""
    fleet = Fleet("x", "y")
    fleet.lists("x", "small")
    fleet.lists("y", "small")
    fleet.route({"gone": ModelRoute(fallback=("small",)), "gpt-*": ModelRoute(fallback=("lost", "small"))})
    assert fleet.steps("gone") == fleet.steps("gpt-4") == [("small", "x y")]
    assert fleet.steps("unheard") == [("unheard", "x y")]
    assert fleet.directory.models()["gone"] == {"id": "gone", "parent": "small"}
    fleet.route({"gone": ModelRoute(fallback=("lost",)), "copied": ModelRoute(shadow={"small": 1})})
    assert fleet.steps("gone") == [("gone", "x y"), ("lost", "x y")]
    assert fleet.directory.models()["copied"] == {"id": "copied"}, "it is no other name of itself"


def test_a_name_of_a_pool_is_listed_with_the_model_that_it_gets() -> None:
    fleet = Fleet("prod/x", "y", pools=(Pool(name="prod"),))
    fleet.lists("prod/x", "m")
    fleet.lists("y", "n")
    fleet.route({"chat": ModelRoute(targets={"prod": 1})})
    assert fleet.directory.models()["chat"] == {"id": "chat", "parent": "m"}


def test_a_name_that_fits_a_pattern_has_a_card() -> None:
    fleet = Fleet("a/x", "b/y", pools=(Pool(name="a", models=["large", "claude-*"]), Pool(name="b")))
    fleet.lists("a/x", "large")
    fleet.lists("b/y", "small")
    fleet.route({"gpt-*": ModelRoute(targets={"small": 1})})
    assert fleet.directory.card("gpt-4") == {"id": "gpt-4", "parent": "small"}
    assert fleet.directory.card("claude-opus") == {"id": "claude-opus"}
    assert fleet.directory.card("small") == {"id": "small"}
    assert fleet.directory.card("unheard") is None


def test_pools_as_targets() -> None:
    pools = (Pool(name="prod"), Pool(name="canary"))
    fleet = Fleet("prod/x", "canary/y", pools=pools)
    fleet.lists("prod/x", "m")
    fleet.lists("canary/y", "m")
    assert fleet.steps("m") == [("m", "prod/x canary/y")]
    fleet.route({"m": ModelRoute(targets={"prod": 1, "canary": 0})})
    assert fleet.steps("m") == [("m", "prod/x")]


def test_shadows() -> None:
    pools = (Pool(name="prod"), Pool(name="next"))
    fleet = Fleet("prod/x", "next/y", pools=pools)
    fleet.directory._routes._rng = random.Random(1)
    fleet.lists("prod/x", "m", "n")
    fleet.lists("next/y", "m")
    fleet.route({"m": ModelRoute(shadow={"next": 0.25, "n": 0.25})})
    assert fleet.steps("m") == [("m", "prod/x")], "a shadow gets copies alone"
    copies = Counter(
        shadow and shadow[1] and (shadow[1].model, shadow[1].endpoints[0].url)
        for shadow in (fleet.directory.shadow("m", "m") for _ in range(2000))
    )
    assert set(copies) == {None, ("m", "http://next/y"), ("n", "http://prod/x")}
    assert all(400 < copies[each] < 600 for each in copies if each is not None)
    assert fleet.directory.shadow("n", "n") is None
    assert any(fleet.directory.shadow("alias", "m") for _ in range(100)), "that of its target"


def test_a_shadow_of_a_pattern_gets_copies_alone() -> None:
    fleet = Fleet("prod/x", "next/y", pools=(Pool(name="prod"), Pool(name="next")))
    fleet.lists("prod/x", "chat-7b", "other")
    fleet.lists("next/y", "chat-7b", "other")
    fleet.route({"chat-*": ModelRoute(shadow={"next": 0.5})})
    assert fleet.steps("chat-7b") == [("chat-7b", "prod/x")]
    assert fleet.steps("other") == [("other", "prod/x next/y")]
    fleet.route({"chat-*": ModelRoute(targets={"other": 1}, shadow={"next": 0.5})})
    assert fleet.steps("chat-7b") == [("other", "prod/x")]


def test_requests_that_only_some_can_serve_get_their_model() -> None:
    fleet = Fleet("x", "y")
    fleet.lists("x", "small")
    fleet.lists("y", "large")
    fleet.route({"chat": ModelRoute(targets={"small": 1, "large": 0})})
    owner = [fleet.endpoints["y"]]
    assert fleet.directory.step_at(owner, "chat").model == "large"
    assert fleet.directory.step_at(owner, "small").model == "small", "which it will refuse"


# -- what is remembered


def test_steps_are_the_same_until_something_changes() -> None:
    fleet = Fleet("x", "y")
    fleet.lists("x", "m")
    fleet.lists("y", "m")
    before = fleet.directory.steps("m")
    fleet.lists("y", "m")
    assert fleet.directory.steps("m") is before
    fleet.lists("y", "m", "n")
    assert fleet.directory.steps("m") is not before


def test_invented_names_are_not_kept() -> None:
    fleet = Fleet("x", unknown="relay")
    fleet.lists("x", "m")
    for number in range(10_000):
        fleet.directory.steps(f"invented {number}")
    fleet.directory.steps("x" * 1_000_000)
    assert len(fleet.directory._steps) <= 4096
    assert all(len(asked) < 300 for asked, _ in fleet.directory._steps)
    assert len({id(steps[0].endpoints) for steps in fleet.directory._steps.values()}) == 1


def test_adapters_that_metrics_name() -> None:
    fleet = Fleet("x", "y")
    fleet.lists("x", "m")
    fleet.lists("y", "m")
    assert fleet.directory.add_adapters(fleet.endpoints["y"], {"sql"})
    assert fleet.steps("sql") == [("sql", "y")]
    assert not fleet.directory.add_adapters(fleet.endpoints["y"], {"sql"})


def test_adapters_that_metrics_name_are_bounded() -> None:
    fleet = Fleet("x", unknown="refuse")
    fleet.lists("x", "m")
    endpoint = fleet.endpoints["x"]
    assert not fleet.directory.add_adapters(endpoint, {"x" * 300, "a\nb", ""})
    for start in (0, 5000):
        fleet.directory.add_adapters(endpoint, {f"a{number}" for number in range(start, start + 5000)})
        assert len(fleet.directory.models()) == MAX_MODELS
