"""How many endpoints and requests each model has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import islice

from penstock.gateway.metric_definitions import (
    MODEL_ENDPOINTS,
    MODEL_QUEUED,
    MODEL_READY,
    MODEL_RUNNING,
    Figure,
)
from penstock.gateway.models.directory import ModelDirectory
from penstock.gateway.requests.name_table import WILDCARDS
from penstock.gateway.responses.request_record import RequestRecord

ANY, OTHER = "*", "other"
"""The model of endpoints that list none; all models that no endpoint lists, or that are too many."""


MAX_MODELS = 1024
"""Pairs of a model and a pool with figures."""


def model_figures(directory: ModelDirectory, in_flight: Iterable[RequestRecord]) -> Iterator[Figure]:
    """For metrics."""
    names: dict[str, None] = {}
    for (model, pool), endpoints in islice(sorted(directory.by_model().items()), MAX_MODELS):
        names[model or ANY] = None
        labels = {"model": model or ANY} | ({"pool": pool} if pool else {})
        yield Figure(MODEL_ENDPOINTS, len(endpoints), labels)
        yield Figure(MODEL_READY, sum(each.is_up and not each.drained for each in endpoints), labels)
    patterns = [name for name in names if name != ANY and not WILDCARDS.isdisjoint(name)]
    rest = ANY if ANY in names else OTHER
    running: Counter[str] = Counter(dict.fromkeys((*names, OTHER), 0))
    waiting = running.copy()
    for record in in_flight:
        model = record.target_model
        if model not in names:
            model = next((each for each in patterns if fnmatchcase(model, each)), rest)
        running[model] += 1
        waiting[model] += record.waits
    for model, count in running.items():
        yield Figure(MODEL_RUNNING, count, {"model": model})
        yield Figure(MODEL_QUEUED, waiting[model], {"model": model})
