"""Options of how replies are streamed."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import option
from penstock.config.groups.tls import TlsOptions


class StreamOptions(TlsOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of how replies are streamed."""

    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"],
        option(
            "Tokens per event: a number, or auto for one event per token while the server keeps up. "
            "The first token is always sent at once.",
            "Streaming",
        ),
    ] = "auto"
    min_stream_interval: Annotated[
        int,
        option(
            "Fewest tokens per event that a request may ask for; finer wishes get this.",
            "Streaming",
            ge=1,
            le=1024,
        ),
    ] = 1
    stream_interval_ms: Annotated[
        Annotated[int, Meta(ge=1, le=60_000)] | None,
        option(
            "One event per so many milliseconds instead of per number of tokens; no token is held longer.",
            "Streaming",
        ),
    ] = None
    max_stream_backlog: Annotated[
        int,
        option("Bytes that may wait for a client that reads slowly before it is cut.", "Streaming", ge=4096),
    ] = 4 << 20
    sse_keep_alive: Annotated[
        float,
        option(
            "Seconds of silence after which a stream's client gets a comment line; 0: never.",
            "Streaming",
            ge=0,
        ),
    ] = 15.0
    compat_done_after_error: Annotated[
        bool,
        option(
            "Send [DONE] after an error event, as vLLM does; such a stream ends like a complete one.",
            "Streaming",
        ),
    ] = False
