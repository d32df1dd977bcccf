"""Options of the response store."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import option, option_group


@option_group
class ResponseStoreOptions:
    """Options of the response store."""

    response_store: Annotated[
        Literal["disk", "memory", "off"],
        option(
            "Where responses with store: true are kept. disk: in --response-store-dir; memory: until the "
            "server ends; off: nowhere, and background and previous_response_id are refused.",
            "Responses",
        ),
    ] = "disk"
    response_store_dir: Annotated[
        str | None,
        option(
            "Directory of stored responses, on a local disk, created with mode 0700; it outlives the server. "
            "Default: in --run-dir.",
            "Responses",
            metavar="DIR",
        ),
    ] = None
    response_store_bytes: Annotated[
        Annotated[int, Meta(ge=1 << 20)] | None,
        option(
            "Maximum size of stored responses, in bytes; beyond it those that were not used for longest are "
            "removed. Default: 1Gi, in memory 256Mi.",
            "Responses",
        ),
    ] = None
    response_store_ttl: Annotated[
        float,
        option("Time that a response is stored, in seconds.", "Responses", gt=0),
    ] = 30 * 86400.0
