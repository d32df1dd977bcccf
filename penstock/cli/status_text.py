"""A status as tables, or as one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.cli.terminal import visible

Row = dict[str, Any]

MAX_REASON = 60
"""Characters of a reason in a table; ``--json`` has all of them."""
_SHOWN: dict[str, Callable[[float], str]] = {
    "up": lambda value: "yes" if value else "no",
    "kv_used": lambda value: f"{100 * value:.1f} %",
    "tokens_per_s": lambda value: f"{value:.1f}",
    "prompt_tokens_per_s": lambda value: f"{value:.1f}",
    "acceptance": lambda value: f"{100 * value:.1f} %",
    "known": lambda value: f"{100 * value:.1f} %",
    "images_per_s": lambda value: f"{value:.1f}",
    "decoded_per_s": lambda value: f"{value:.1f}",
    "cost": lambda value: f"{value:.4f}",
    "tokens_per_step": lambda value: f"{value:.2f}",
}
"""Formats of the columns that are not counts."""


def tables(status: dict[str, Any]) -> str:
    """A status as text of several lines."""
    if status["kind"] == "gateway":
        outcomes = [{"outcome": outcome, "requests": count} for outcome, count in status["requests"].items()]
        first = f"gateway, {status['in_flight']:.0f} requests in flight"
        parts = [first, *_table(status["models"]), "", *_table(status["endpoints"]), "", *_table(outcomes)]
        failures = [row | {"reason": _short(row["reason"])} for row in status["failures"]]
        parts += ["", *_table(failures)] if failures else []
        for costs in (status["costs"], status["key_costs"]):
            parts += ["", *_table(costs)] if costs else []
    else:
        parts = [_headline(status), *_table(status["engines"]), "", *_table(status["api_servers"])]
        if status["adapters"]:
            rows = [
                row | {"missing": [_short(each) for each in row["missing"]]} for row in status["adapters"]
            ]
            parts += ["", *_table(rows)]
        parts += ["", *_table(status["images"])] if status["images"] else []
    return "\n".join(parts).rstrip()


def line(status: dict[str, Any]) -> str:
    """A status, summed up in one line."""
    if status["kind"] == "gateway":
        endpoints = status["endpoints"]
        up = sum(bool(each.get("up")) for each in endpoints)
        return f"{status['in_flight']:.0f} requests in flight, {up} of {len(endpoints)} endpoints up"
    engines = status["engines"]
    parts = [
        f"{_ready(engines)} of {len(engines)} engines ready",
        f"{sum(each['running'] for each in engines)} running",
        f"{sum(each['waiting'] for each in engines)} waiting",
        f"KV cache {100 * max((each['kv_used'] for each in engines), default=0):.1f} %",
    ]
    if engines and "tokens_per_s" in engines[0]:
        parts.append(f"{sum(each['tokens_per_s'] for each in engines):.1f} tokens/s")
    if "acceptance" in status:
        parts.append(f"drafts accepted {100 * status['acceptance']:.1f} %")
        parts.append(f"{status['tokens_per_step']:.2f} tokens/step")
    for images in status["images"]:
        parts.append(f"{images['images']} images ({100 * images['known']:.1f} % known)")
    return ", ".join([*parts, f"{status['errors']} errors", f"{status['restarts']} restarts"])


def _headline(status: dict[str, Any]) -> str:
    names = visible(", ".join(status["models"]))
    since = "" if status["uptime_s"] is None else f", up for {_duration(status['uptime_s'])}"
    return f"{names}, Penstock {visible(status['version'])}{since}, {status['errors']} failed requests"


def _short(text: str) -> str:
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"


def _ready(engines: list[Row]) -> int:
    return sum(each["state"] == "ready" for each in engines)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


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
    if isinstance(value, list):
        return visible(", ".join(map(str, value))) or "-"
    if isinstance(value, str):
        return visible(value)
    return _SHOWN.get(column, "{:.0f}".format)(value)
