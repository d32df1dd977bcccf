"""How TEI's routes truncate."""

from __future__ import annotations

from penstock.generation.pooling.plan import PoolingPlan
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.http.errors import refused


def truncate_as_tei(
    plan: PoolingPlan, processor: PoolingProcessor, truncate: bool | None, side: str | None
) -> None:
    """Set how long inputs are cut: by default they are. Raises ApiError."""
    if plan.truncate is None and truncate is not False:
        plan.truncate = processor.max_tokens
    if side is not None:
        if side.lower() not in ("left", "right"):
            raise refused("truncation_direction must be left or right.", "truncation_direction", side)
        plan.truncate_left = side.lower() == "left"
