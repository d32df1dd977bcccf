"""Values of vLLM's that an option of the same name calls otherwise."""

from __future__ import annotations

import json

VALUES: dict[tuple[str, str], str] = {
    ("--dtype", "half"): "float16",
    ("--dtype", "float"): "float32",
    ("--generation-config", "vllm"): "none",
    ("--async-scheduling", "true"): "on",
    ("--async-scheduling", "false"): "off",
    ("--log-level", "DEBUG"): "debug",
    ("--log-level", "NOTSET"): "debug",
    ("--log-level", "INFO"): "info",
    ("--log-level", "WARNING"): "warning",
    ("--log-level", "ERROR"): "error",
    ("--log-level", "CRITICAL"): "error",
}
"""By flag and vLLM's value."""

JSON_LISTS = frozenset({"--allowed-origins", "--allowed-methods", "--allowed-headers"})
"""Options whose list vLLM takes as one JSON text."""


def translated(flag: str, given: str | list[str] | None) -> str | list[str] | None:
    """vLLM's value of an option in Penstock's words; None for a value that both write alike."""
    if isinstance(given, list):
        if flag in JSON_LISTS and len(given) == 1 and given[0].startswith("["):
            return _list(given[0])
        return None
    if flag in JSON_LISTS and given is not None and given.startswith("["):
        return _list(given)
    return None if given is None else VALUES.get((flag, given))


def _list(text: str) -> list[str] | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, list) and all(isinstance(each, str) for each in values) else None
