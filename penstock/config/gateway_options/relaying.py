"""Options of the gateway: how requests are relayed."""

from __future__ import annotations

from typing import Annotated, Literal

from penstock.config.describe import option, option_group


@option_group
class RelayingOptions:
    """Options of the gateway: how requests are relayed."""

    include_usage: Annotated[
        Literal["auto", "off", "require"],
        option(
            "Token usage in streams. auto: the gateway asks for it where the client does not say, "
            "and removes it from the reply; off: it never asks; require: it asks even if the client "
            "declines or the endpoint refuses.",
            "Relaying",
        ),
    ] = "auto"
    allow_kv_transfer_params: Annotated[
        bool,
        option(
            "Relay kv_transfer_params (vLLM) and bootstrap_host (SGLang) of clients, which name hosts that a "
            "model server then fetches KV caches from: for a router in front of the gateway. Otherwise such "
            "requests get 400.",
            "Relaying",
        ),
    ] = False
    max_relayed_bytes: Annotated[
        int,
        option(
            "Maximum size of a request body that is relayed as it comes, in bytes: files, audio, images, and "
            "whatever is not JSON. --max-request-bytes bounds the others, and these if it is larger.",
            "Relaying",
            ge=1024,
        ),
    ] = 1 << 30
    upstream_http2: Annotated[
        Literal["auto", "off", "require"],
        option(
            "HTTP/2 to endpoints. auto: where they speak it, which the gateway finds out once per "
            "endpoint (by ALPN with https; with http by the beginning of HTTP/2 on a connection of its own, "
            "which others refuse); off: never; require: endpoints that do not speak it get no requests.",
            "Relaying",
        ),
    ] = "auto"
    max_attempts: Annotated[
        int,
        option(
            "Maximum endpoints at which a request may fail, if it may be sent again; refusals (429, 503) "
            "do not count.",
            "Relaying",
            ge=1,
            le=16,
        ),
    ] = 3
    connect_timeout: Annotated[
        float, option("Maximum time to connect to an endpoint, in seconds.", "Relaying", gt=0)
    ] = 5.0
    first_token_timeout: Annotated[
        float, option("Maximum time from sending a request to its first token, in seconds.", "Relaying", gt=0)
    ] = 300.0
    event_timeout: Annotated[
        float,
        option(
            "Maximum time between two events of a response, or without the client reading, in seconds.",
            "Relaying",
            gt=0,
        ),
    ] = 60.0
    request_timeout: Annotated[
        float, option("Maximum time of a request with all attempts, in seconds.", "Relaying", gt=0)
    ] = 3600.0
