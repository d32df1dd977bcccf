"""Options of ``penstock status``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.config.client import ALLOWED_URL
from penstock.config.describe import ALLOWED_KEY, Key, option


class StatusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of ``penstock status``."""

    url: Annotated[
        str,
        option(
            "URL of the gateway or server, with or without /v1.",
            "Server",
            pattern=r"^https?://[^/]+",
            allowed=ALLOWED_URL,
        ),
    ] = "http://127.0.0.1:8000"
    api_key: Annotated[
        Key | None,
        option("API key, sent as a bearer token.", "Server", secret=True, allowed=ALLOWED_KEY),
    ] = None
    timeout: Annotated[
        float, option("Maximum time without data from the server, in seconds.", "Server", gt=0)
    ] = 10.0
    interval: Annotated[
        float,
        option(
            "Time between the readings that rates are computed from, in seconds; 0: one reading, no rates.",
            "Output",
            ge=0,
        ),
    ] = 1.0
    json: Annotated[bool, option("Print one JSON object instead of tables.", "Output")] = False
    watch: Annotated[
        bool,
        option(
            "Show the status again and again until Ctrl-C: in place on a terminal, else a line each time.",
            "Output",
        ),
    ] = False
