"""Options of ``penstock route``, ``penstock drain`` and ``penstock undrain``, which ask a running gateway."""

from __future__ import annotations

from typing import Annotated, Literal

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


@option_group
class RouteConfig(ConnectionOptions):
    """Options of ``penstock route``. ``api_key`` is one of an administrator."""

    timeout: ReadTimeout = 10.0
    model: Annotated[
        str | None, option("Model that the request names. Default: that of --body.", "Request")
    ] = None
    body: Annotated[
        str | None,
        option(
            "File with the body of the request, JSON; -: standard input. Default: only the model is known.",
            "Request",
            metavar="FILE",
        ),
    ] = None
    api: Annotated[
        Literal["chat", "completions", "responses", "messages"], option("Whose body it is.", "Request")
    ] = "chat"
    session: Annotated[
        str | None, option("Session of the request. Default: that in the body.", "Request")
    ] = None
    key_file: Annotated[
        str | None,
        option(
            "File whose first line is the key of the client that would send it; its SHA-256 is sent.",
            "Request",
            metavar="FILE",
        ),
    ] = None
    json: Annotated[bool, option("Print one JSON object instead of text.", "Output")] = False
