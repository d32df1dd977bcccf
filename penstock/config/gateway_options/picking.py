"""Options of the gateway: which endpoint a request is sent to."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import option, option_group

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
    picker: Annotated[
        Literal["max-score", "power-of-two"],
        option(
            "How an endpoint is chosen. max-score: the best score; power-of-two: the better of two "
            "random ones.",
            "Picking",
        ),
    ] = "max-score"
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
    remote_prefill_tokens: Annotated[
        int,
        option(
            "Tokens of a prompt that are not cached, estimated, from which an endpoint with the role prefill "
            "computes it for one with the role decode.",
            "Picking",
            ge=1,
        ),
    ] = 512
    session_header: Annotated[
        str, option("Request header with the session id, for the session scorer.", "Picking")
    ] = "x-session-id"
    affinity_excess: Annotated[
        float,
        option(
            "Prefix and session affinity skip an endpoint with more requests than this multiple of "
            "the least loaded one's, plus 8.",
            "Picking",
            ge=1,
        ),
    ] = 1.5
    saturated_waiting: Annotated[
        int,
        option(
            "Waiting requests at which an endpoint counts as saturated. Low priorities are refused "
            "when all endpoints are.",
            "Picking",
            ge=1,
        ),
    ] = 5
    saturated_kv_used: Annotated[
        float,
        option(
            "KV cache usage at which an endpoint counts as saturated, as a fraction.", "Picking", gt=0, le=1
        ),
    ] = 0.95
    ttft_slo: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        option("Target time to first token of the slo scorer, in seconds.", "Picking"),
    ] = None
