"""Options of the end of ``serve`` and ``gateway``."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from penstock.config.describe import option, option_group

DrainTimeout: TypeAlias = Annotated[
    float,
    option(
        "Maximum time for running requests to finish after SIGTERM or SIGINT, in seconds.", "Processes", ge=0
    ),
]


@option_group
class ShutdownOptions:
    """How long requests are still served."""

    drain_timeout: DrainTimeout = 5.0
    drain_grace: Annotated[
        float,
        option(
            "Time between SIGTERM and the shutdown, in seconds: /ready answers 503, but requests are served "
            "until load balancers have noticed. SIGINT (Ctrl-C) and a second signal end it.",
            "Processes",
            ge=0,
        ),
    ] = 0.0
