"""Scores of endpoints for a request by their load: 0 is the worst, 1 the best."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.gateway.routing.endpoint_columns import EndpointColumns, Floats, Rows
from penstock.gateway.routing.pick_request import PickRequest

Scorer = Callable[[PickRequest, EndpointColumns, Rows], Floats | None]
"""Maps a request and the rows of its candidates to one score for each; None: all have the same."""


FEW_REQUESTS = 8.0
FEW_TOKENS = 4096.0
"""Differences that say little: smaller ones count by their share of these. Otherwise one request more or less
would outweigh a cached prompt."""


def _fewest(counts: Floats, few: float) -> Floats | None:
    """0 for the largest count; 1 for the smallest, or its share if it is smaller by less than ``few``."""
    low, high = counts.min(), counts.max()
    return None if high == low else (high - counts) / max(high - low, few)


def _queue(request: PickRequest, columns: EndpointColumns, rows: Rows) -> Floats | None:
    return _fewest(columns.waiting[rows] + columns.sent[rows], FEW_REQUESTS)


def _running(request: PickRequest, columns: EndpointColumns, rows: Rows) -> Floats | None:
    return _fewest(columns.requests(rows), FEW_REQUESTS)


def _kv(request: PickRequest, columns: EndpointColumns, rows: Rows) -> Floats | None:
    return 1.0 - columns.kv_used[rows]


def _tokens(request: PickRequest, columns: EndpointColumns, rows: Rows) -> Floats | None:
    return _fewest(columns.tokens[rows], FEW_TOKENS)


def _lora(request: PickRequest, columns: EndpointColumns, rows: Rows) -> Floats | None:
    """1 where the adapter of that name is loaded, 0.5 where there is room for it."""
    scores = columns.adapter_room
    if loaded := columns.with_adapter(request.model):
        scores = scores.copy()
        scores[list(loaded)] = 1.0
    return scores[rows]


def _slo(request: PickRequest, columns: EndpointColumns, rows: Rows) -> Floats | None:
    """Distance of the average time to first token below the objective, as a share of the objective."""
    slo = request.ttft_slo_s
    return None if slo is None else np.maximum(0.0, 1.0 - columns.ttft_s[rows] / slo)


LOAD_SCORERS: dict[str, Scorer] = {
    "queue": _queue,
    "running": _running,
    "kv": _kv,
    "tokens": _tokens,
    "lora": _lora,
    "slo": _slo,
}
