"""How hard a model is to think, as variables of its chat template."""

from __future__ import annotations

from typing import Any

from penstock.http.errors import refused

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def reasoning_variables(
    effort: str | None, field: str, variables: dict[str, Any] | None
) -> dict[str, Any] | None:
    """``variables`` of the request, with those for its ``effort``. ``field``: of the effort. Raises
    ApiError."""
    if effort is None:
        return variables
    if effort not in REASONING_EFFORTS:
        raise refused(f"{field} must be one of {', '.join(REASONING_EFFORTS)}.", field, effort)
    # Some templates know the effort, others only whether to think.
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **(variables or {})}
