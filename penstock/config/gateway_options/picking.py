"""Options of the gateway: which endpoint a request is sent to."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.config.describe import ALLOWED_HEADER, HeaderName, option, option_group

Scorers = Annotated[
    str,
    option(
        "Scorers and their weights: queue, running, kv, tokens, prefix, session, lora, slo.",
        "Picking",
        metavar="NAME=WEIGHT,...",
    ),
]
DEFAULT_SCORERS = "queue=2,running=1,kv=1,prefix=2,session=2"


@option_group
class PickingOptions:
    """Options of the gateway: which endpoint a request is sent to."""

    scorers: Scorers = DEFAULT_SCORERS
    kv_events: Annotated[
        list[Annotated[str, Meta(pattern=r"^(https?://[^=\s]+=)?[0-9]{1,5}(:[0-9]{1,5})?\Z")]] | None,
        option(
            "Ports at which endpoints publish their KV cache events, and replay them: the prefix scorer then "
            "knows what is cached. With URL, of that endpoint; without, of all others.",
            "Picking",
            metavar="[URL=]PORT[:REPLAY_PORT]",
            allowed="[URL=]PORT or [URL=]PORT:REPLAY_PORT",
        ),
    ] = None
    kv_events_ranks: Annotated[
        int,
        option(
            "Data-parallel ranks of each endpoint that publish, at consecutive ports.", "Picking", ge=1, le=64
        ),
    ] = 1
    session_header: Annotated[
        HeaderName,
        option(
            "Request header with the session id, for the session scorer.", "Picking", allowed=ALLOWED_HEADER
        ),
    ] = "x-session-id"
    ttft_slo: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        option("Target time to first token of the slo scorer, in seconds.", "Picking"),
    ] = None
