"""Options of ``penstock status``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.config.describe import option


class StatusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``penstock status`` runs with."""

    url: Annotated[
        str,
        option(
            "Address of the gateway or server, with or without /v1.", "Server", pattern=r"^https?://[^/]+"
        ),
    ] = "http://127.0.0.1:8000"
    api_key: Annotated[str | None, option("Key to present as a bearer token.", "Server", secret=True)] = None
    timeout: Annotated[float, option("Seconds the server may stay silent.", "Server", gt=0)] = 10.0
    interval: Annotated[
        float,
        option("Seconds between the two readings that rates are made of; 0: one, no rates.", "Output", ge=0),
    ] = 1.0
    json: Annotated[bool, option("Print one JSON object instead of tables.", "Output")] = False
