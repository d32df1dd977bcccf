"""Options of ``penstock drain`` and ``penstock undrain``."""

from __future__ import annotations

from typing import Annotated

from penstock.config.describe import option, option_group
from penstock.config.options.connection import ConnectionOptions, ReadTimeout


@option_group
class UndrainConfig(ConnectionOptions):
    """Options of both commands: which endpoint of which gateway. The key is one of an administrator."""

    timeout: ReadTimeout = 10.0
    endpoint: Annotated[
        str | None,
        option("URL of the endpoint, as penstock status shows it.", "Endpoint", positional=True),
    ] = None


@option_group
class DrainConfig(UndrainConfig):
    """Options of ``penstock drain``."""

    wait: Annotated[
        float,
        option(
            "Maximum time to wait until the requests have ended that run there, in seconds.",
            "Endpoint",
            ge=0,
            le=3600,
        ),
    ] = 0.0
