"""A router over endpoints that list no models, for tests without sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.gateway.admission.admission import Admission
from penstock.gateway.admission.budget_store import MemoryBudgetStore
from penstock.gateway.admission.budgets import Budgets
from penstock.gateway.models.directory import ModelDirectory
from penstock.gateway.models.learner import ModelLearner
from penstock.gateway.models.model_routes import read_routes
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.picker import Picker
from penstock.gateway.routing.router import Router

INCOMING = IncomingRequest("POST", b"/", "/", [], b"", None)


def router_over(
    pool: EndpointPool, picker: Picker, clock: Callable[[], float], rewrites: Sequence[str] = ()
) -> Router:
    directory = ModelDirectory()
    directory.update(pool.endpoints, routes=read_routes(rewrites, (), ()))
    return Router(pool, ModelLearner(pool, directory, clock, interval_s=0), picker, clock, admits_all(clock))


def admits_all(clock: Callable[[], float]) -> Admission:
    """An admission without budgets or queues."""
    return Admission(Budgets(MemoryBudgetStore(clock), clock))
