"""``GET /status``: the whole fleet as one JSON object, for the web page and ``penstock status``.

It shows counters since the start, of which a reader makes rates: it costs the server no state. Its size grows
with the number of processes alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from penstock import __version__
from penstock.api.routes.adapters import describe_adapters
from penstock.dispatch.connections import EngineState
from penstock.dispatch.engine_client import EngineClient
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.metrics import families as f
from penstock.metrics.families import MetricFamily
from penstock.metrics.media_metrics import OUTCOMES
from penstock.metrics.merge import Totals
from penstock.metrics.snapshot import Distribution, process_name

Json = dict[str, Any]
Column = dict[str, float]
"""Values by the name of an engine, API server or process, or by outcome."""

_ENGINE_VALUES = {
    "running": f.RUNNING,
    "waiting": f.WAITING,
    "kv_used": f.KV_USAGE,
    "prompt_tokens": f.PROMPT_TOKENS,
    "tokens": f.GENERATION_TOKENS,
    "prefix_cache_queries": f.PREFIX_QUERIES,
    "prefix_cache_hits": f.PREFIX_HITS,
    "preemptions": f.PREEMPTIONS,
    "drafts": f.SPEC_DRAFTS,
    "draft_tokens": f.SPEC_DRAFT_TOKENS,
    "accepted_tokens": f.SPEC_ACCEPTED,
}
_SERVER_VALUES = {
    "connections": f.CONNECTIONS,
    "streams": f.STREAMS,
    "bytes_queued": f.BYTES_QUEUED,
    "tokens": f.DELIVERED,
}
_MEDIA_WORKER = "media-worker "
_ENGINE, _SERVER, _SUPERVISOR = "engine", "api-server", process_name("supervisor", 0)


def fleet_status(totals: Totals, engine_client: EngineClient, models: Sequence[str], template: Json) -> Json:
    """The reply. ``totals``: of all processes, as one API server knows them; ``template``: what
    :func:`about_template` says of the model's."""
    starts = _column(totals, f.START_TIME)
    restarts = _column(totals, f.RESTARTS)

    def process(role: str, name: str) -> Json:
        title = process_name(role, int(name))
        return {"restarts": restarts.get(title, 0), "started": starts.get(title)}

    figures = {name: _column(totals, family) for name, family in _ENGINE_VALUES.items()}
    engine_rows = [
        {
            "engine": (name := str(engine.rank)),
            "host": engine.host or None,
            "state": state_of(engine),
            "weight_version": engine.weight_version,
            **{column: values.get(name, 0) for column, values in figures.items()},
            **process(_ENGINE, name),
        }
        for engine in engine_client.engines
    ]
    figures = {name: _column(totals, family) for name, family in _SERVER_VALUES.items()}
    server_rows = [
        {
            "server": name,
            **{column: values.get(name, 0) for column, values in figures.items()},
            **process(_SERVER, name),
        }
        for name in sorted(figures["connections"], key=int)
    ]
    return {
        "kind": "server",
        "version": __version__,
        "models": list(models),
        **template,
        "adapters": describe_adapters(engine_client),
        "time": time.time(),
        "started": starts.get(_SUPERVISOR),
        "engines": engine_rows,
        "api_servers": server_rows,
        "requests": _column(totals, f.REQUESTS),
        "rejected": _column(totals, f.REJECTED),
        "interrupted": _column(totals, f.INTERRUPTED),
        "restarts": sum(restarts.values()),
        "images": {
            **dict.fromkeys(OUTCOMES, 0),
            **_column(totals, f.MEDIA_IMAGES),
            "refused": sum(_column(totals, f.MEDIA_REFUSED).values()),
            "cache_bytes": max(_column(totals, f.MEDIA_CACHE_BYTES).values(), default=0),
            "workers": sum(name.startswith(_MEDIA_WORKER) for name in restarts),
        },
    }


def about_template(template: ChatTemplate | None) -> Json:
    """What the page has to know of a model's chat template."""
    return {
        "chat": template is not None,
        "thinking": [] if template is None else template.thinking_variables(),
    }


def state_of(engine: EngineState) -> str:
    """One word for whether the engine takes requests."""
    if not engine.up:
        return "down"
    if engine.draining or engine.leaving:
        return "draining"
    if engine.asleep:
        return "asleep"
    if engine.paused:
        return "paused"
    return "behind" if engine.closed else "ready"  # it is not as desired yet


_NAMES = ("engine", "server", "process", "outcome", "reason", "status")
"""The label that tells a family's rows apart, in the families that this module reads."""


def _column(totals: Totals, family: MetricFamily) -> Column:
    """A family's values, added up over its other labels. Whole numbers are shown without a point."""
    label = next(family.labels.index(name) for name in reversed(_NAMES) if name in family.labels)
    column: Column = {}
    for labels, value in totals.get(family.name, {}).items():
        assert not isinstance(value, Distribution)
        column[labels[label]] = column.get(labels[label], 0) + value
    return {name: int(value) if float(value).is_integer() else value for name, value in column.items()}
