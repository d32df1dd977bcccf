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
