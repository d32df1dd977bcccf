"""Options of the gateway: metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option, option_group


@option_group
class MetricsOptions:
    """Options of the gateway: metrics."""

    metrics_compat: Annotated[
        Literal["none", "llm-d", "gie"],
        option(
            "Additional metric names and labels. llm-d: of the llm-d Router's endpoint picker; gie: "
            "of the Gateway API Inference Extension's.",
            "Metrics",
        ),
    ] = "none"
    metrics_max_models: Annotated[
        int,
        option(
            "Maximum models with metrics of their own, besides those that endpoints list, and those of "
            "--model-rewrite and its like; others count as 'other'.",
            "Metrics",
            ge=0,
        ),
    ] = 64
    metrics_pool_name: Annotated[
        str | None,
        option(
            "Pool that metrics name for endpoints of none. Default: the --kubernetes-pool, if there is one; "
            "else penstock.",
            "Metrics",
        ),
    ] = None
