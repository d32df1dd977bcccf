"""A report of ``penstock gateway --check`` as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def report_text(report: Mapping[str, Any]) -> str:
    """Errors first, then warnings, then what holds."""
    keys, options = report["keys"], report["options"]
    dates = [f"{each['option']} {each['file']}: until {each['until']}" for each in report["certificates"]]
    sections = [
        (_counted(len(report["errors"]), "error"), report["errors"]),
        (_counted(len(report["warnings"]), "warning"), report["warnings"]),
        *((_pool_line(pool), _endpoints(pool["endpoints"])) for pool in report["pools"]),
        ("endpoints of no pool", _endpoints(report["endpoints"])),
        ("pools of Kubernetes", report["kubernetes_pools"]),
        ("names of models", [_name_line(name, route) for name, route in report["names"].items()]),
        (_keys_line(keys), [_key_line(key) for key in keys["named"]]),
        ("certificates", dates),
        ("options that are not at their defaults", [_option_line(*each) for each in options.items()]),
    ]
    lines = [
        line
        for title, rows in sections
        if rows or title.startswith(("keys", "pool "))
        for line in (title, *(f"  {row}" for row in rows), "")
    ]
    return "\n".join([*lines, "ok: the gateway can start" if report["ok"] else "the gateway cannot start"])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _weighted(weights: Mapping[str, float]) -> str:
    return _listed(name if weight == 1 else f"{name} ({weight:g})" for name, weight in weights.items())


def _pool_line(pool: Mapping[str, Any]) -> str:
    models = "those that its endpoints list" if pool["models"] is None else _listed(pool["models"])
    parts = [f"models: {models}"]
    if pool["role"] != "both":
        parts.append(f"role: {pool['role']}")
    if pool["apis"]:
        parts.append(f"apis: {_listed(pool['apis'])}")
    if pool["fallback"]:
        parts.append(f"fallback: {_listed(pool['fallback'])}")
    if pool["also_set"]:
        parts.append(f"with {_listed(pool['also_set'])}")
    return f"pool {pool['name']}; {'; '.join(parts)}"


def _endpoints(endpoints: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{each['url']}  {_listed(each['addresses']) or 'does not resolve'}" for each in endpoints]


def _name_line(name: str, route: Mapping[str, Any]) -> str:
    parts = [f"{name} -> {_weighted(route['targets']) or name}"]
    if route["fallback"]:
        parts.append(f"fallback: {_listed(route['fallback'])}")
    if route["shadow"]:
        parts.append(f"shadow: {_weighted(route['shadow'])}")
    return "; ".join(parts)


def _keys_line(keys: Mapping[str, Any]) -> str:
    if not keys["needed"]:
        told = "none needed, anybody who can connect may use the gateway"
    else:
        told = f"{_counted(len(keys['named']), 'name')}, {keys['unnamed']} without a name"
    issuers = f", tokens of {', '.join(keys['issuers'])}" if keys["issuers"] else ""
    return f"keys: {told}{issuers}; {keys['administrators']} of administrators"


def _key_line(key: Mapping[str, Any]) -> str:
    parts = [_counted(key["keys"], "key"), f"models: {_listed(key['models']) or 'all'}"]
    parts += [f"{name}: {amount}" for name, amount in key["budgets"].items()]
    if key["refused"]:
        parts.append(f"refused: {_listed(key['refused'])}")
    if key["priority"] is not None:
        parts.append(f"priority: {key['priority']}")
    return f"{key['name']}; {'; '.join(parts)}"


def _option_line(flag: str, said: Mapping[str, Any]) -> str:
    value = said["value"]
    shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    by = said["set_by"]
    return f"{flag} {shown}" + (f"  ({by})" if by and by != flag else "")
