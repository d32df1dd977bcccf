"""``penstock status``: the current load of a gateway or a Penstock server, from its ``/metrics``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from penstock.cli import terminal
from penstock.cli.command import Command
from penstock.config.origins import Origins
from penstock.config.status import StatusConfig

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Labels and values by sample name."""
Row = dict[str, Any]

_GATEWAY = "penstock_gateway_"
_ENDPOINT_GAUGES = {
    "up": f"{_GATEWAY}endpoint_up",
    "in_flight": f"{_GATEWAY}endpoint_in_flight",
    "waiting": f"{_GATEWAY}endpoint_waiting",
    "running": f"{_GATEWAY}endpoint_running",
    "kv_used": f"{_GATEWAY}endpoint_kv_used",
}
_ENGINE_GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_used": "vllm:kv_cache_usage_perc",
}
_ENGINE_RATES = {
    "prompt_tokens_per_s": "vllm:prompt_tokens_total",
    "tokens_per_s": "vllm:generation_tokens_total",
}
_SERVER_GAUGES = {
    "connections": "penstock:connections",
    "streams": "penstock:streams",
    "bytes_queued": "penstock:bytes_queued",
}
_SERVER_RATES = {"tokens_per_s": "penstock:tokens_delivered_total"}


def run(config: StatusConfig, origins: Origins) -> int:
    """Prints tables or JSON to standard output. 1 when the metrics cannot be read."""
    from penstock.client import Client, ClientError

    try:
        with Client(config.url, config.api_key, config.timeout) as client:
            earlier = later = read_samples(client.metrics())
            began = time.monotonic()
            if config.interval:
                time.sleep(config.interval)
                later = read_samples(client.metrics())
            status = status_of(earlier, later, time.monotonic() - began if config.interval else 0.0)
            if status is None:
                raise ClientError(f"{client.url}/metrics is neither a Penstock gateway's nor server's")
    except ClientError as error:
        return terminal.report(error)
    print(json.dumps(status) if config.json else tables(status))
    return 0


def read_samples(text: str) -> Samples:
    """The samples of a text in Prometheus' exposition format. Raises ClientError for any other text."""
    from prometheus_client.parser import text_string_to_metric_families

    from penstock.client import ClientError

    samples: Samples = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise ClientError(f"/metrics is not in Prometheus' text format: {error}") from None
    return samples


def status_of(earlier: Samples, later: Samples, seconds: float) -> dict[str, Any] | None:
    """The output of ``--json``; None when the samples are of neither a gateway nor a Penstock server.

    ``seconds`` is the time between both readings; without rates if it is 0.
    """
    if f"{_GATEWAY}requests_in_flight" in later:
        outcomes: dict[str, float] = {}
        for labels, value in later.get(f"{_GATEWAY}request_total", ()):
            outcomes[labels["outcome"]] = outcomes.get(labels["outcome"], 0) + value
        return {
            "kind": "gateway",
            "in_flight": sum(value for _, value in later[f"{_GATEWAY}requests_in_flight"]),
            "endpoints": _rows(later, "endpoint", _ENDPOINT_GAUGES),
            "requests": outcomes,
        }
    if "penstock:connections" not in later:
        return None
    engines = _rows(later, "engine", _ENGINE_GAUGES)
    hosts = {labels["engine"]: labels["host"] for labels, _ in later.get("penstock:engine_info", ())}
    engines = [{"engine": row["engine"], "host": hosts.get(row["engine"]), **row} for row in engines]
    servers = _rows(later, "server", _SERVER_GAUGES)
    if seconds:
        _add_rates(engines, "engine", _ENGINE_RATES, earlier, later, seconds)
        _add_rates(servers, "server", _SERVER_RATES, earlier, later, seconds)
    return {"kind": "server", "engines": engines, "api_servers": servers}


def _rows(samples: Samples, label: str, names: dict[str, str]) -> list[Row]:
    """One row for each value of ``label``; ``names`` maps columns to metrics."""
    rows: dict[str, Row] = {}
    for column, name in names.items():
        for labels, value in samples.get(name, ()):
            rows.setdefault(labels[label], {label: labels[label]})[column] = value
    return list(rows.values())


def _add_rates(
    rows: list[Row], label: str, names: dict[str, str], earlier: Samples, later: Samples, seconds: float
) -> None:
    for column, name in names.items():
        before, after = _totals(earlier, name, label), _totals(later, name, label)
        for row in rows:
            key = row[label]
            gained = after.get(key, 0.0) - before.get(key, 0.0)
            row[column] = round(max(0.0, gained) / seconds, 1)


def _totals(samples: Samples, name: str, label: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for labels, value in samples.get(name, ()):
        totals[labels[label]] = totals.get(labels[label], 0.0) + value
    return totals


# -- tables --------------------------------------------------------------------------------------------

_SHOWN: dict[str, Callable[[float], str]] = {
    "up": lambda value: "yes" if value else "no",
    "kv_used": lambda value: f"{100 * value:.1f} %",
    "tokens_per_s": lambda value: f"{value:.1f}",
    "prompt_tokens_per_s": lambda value: f"{value:.1f}",
}
"""Formats of the columns that are not counts."""


def tables(status: dict[str, Any]) -> str:
    """A status as text."""
    if status["kind"] == "gateway":
        outcomes = [{"outcome": outcome, "requests": count} for outcome, count in status["requests"].items()]
        first = f"gateway, {status['in_flight']:.0f} requests in flight"
        parts = [first, *_table(status["endpoints"]), "", *_table(outcomes)]
    else:
        parts = ["server", *_table(status["engines"]), "", *_table(status["api_servers"])]
    return "\n".join(parts).rstrip()


def _table(rows: list[Row]) -> Iterable[str]:
    """Lines of a header and rows; the first column is left-aligned, others are right-aligned."""
    if not rows:
        return []
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[column.replace("_per_s", "/s").replace("_", " ") for column in columns]]
    cells += [[_cell(column, row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in cells
    ]


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return _SHOWN.get(column, "{:.0f}".format)(value)


COMMAND = Command(("status",), "Show the load of a gateway or a Penstock server.", StatusConfig, run)
