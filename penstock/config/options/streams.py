"""Options of streamed replies."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import option, option_group


@option_group
class StreamedReplyOptions:
    """Options of streamed replies."""

    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"],
        option(
            "Tokens per event. auto: one, more while the server is behind. The first token is always "
            "sent immediately.",
            "Streaming",
        ),
    ] = "auto"
    stream_interval_ms: Annotated[
        Annotated[int, Meta(ge=1, le=60_000)] | None,
        option(
            "Time between events, in milliseconds, instead of tokens per event. Default: by tokens.",
            "Streaming",
        ),
    ] = None
    max_stream_backlog: Annotated[
        int,
        option(
            "Maximum unsent output for a slow client, in bytes; beyond it the connection is closed.",
            "Streaming",
            ge=4096,
        ),
    ] = 4 << 20
    sse_keep_alive: Annotated[
        float,
        option(
            "Time without events after which a stream gets a comment line, in seconds; 0: never.",
            "Streaming",
            ge=0,
        ),
    ] = 15.0
