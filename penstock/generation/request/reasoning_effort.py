"""How hard a model is to think, as variables of its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config.options.effort_map import REASONING_EFFORTS
from penstock.http.errors import refused


def reasoning_variables(
    effort: str | None,
    field: str,
    variables: dict[str, Any] | None,
    efforts: Mapping[str, str | int] | None = None,
) -> dict[str, Any] | None:
    """``variables`` of the request, with those for its ``effort``. ``field``: of the effort;
    ``efforts``: ``--reasoning-effort-map``. Raises ApiError."""
    if effort is None:
        return variables
    if effort not in REASONING_EFFORTS:
        raise refused(f"{field} must be one of {', '.join(REASONING_EFFORTS)}.", field, effort)
    if efforts and isinstance(mapped := efforts.get(effort), str):
        effort = mapped
    # Some templates know the effort, others only whether to think.
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **(variables or {})}
