"""Options of pictures in prompts."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.config.describe import option, option_group

GROUP = "Pictures"
MAX_WORKERS = 64
MAX_IMAGES = 1024
"""Pictures of one request: more than any model's context has room for."""


@option_group
class MediaOptions:
    """Options of pictures in prompts."""

    media_workers: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_WORKERS)] | None,
        option(
            "Processes that fetch, decode and preprocess pictures; 0: the server takes text only. Default: "
            "one per 4 cores, up to 8; none for a model that takes no pictures.",
            GROUP,
        ),
    ] = None
    media_cache: Annotated[
        int,
        option(
            "Preprocessed pictures that are kept in /dev/shm, in bytes; at most 90% of its room.",
            GROUP,
            ge=1 << 20,
        ),
    ] = 4 << 30
    allowed_media_domains: Annotated[
        list[str] | None,
        option(
            "Hosts that pictures may be fetched from: DOMAIN, *.DOMAIN, * for all, ADDRESS (each also with "
            ":PORT) or NETWORK/BITS. Private addresses must be named. Default: none are fetched.",
            GROUP,
            metavar="HOST",
        ),
    ] = None
    allowed_local_media_path: Annotated[
        str | None,
        option(
            "Directory of pictures that requests may name by file: URLs. Default: they may not.",
            GROUP,
            metavar="DIR",
        ),
    ] = None
    media_fetch_timeout: Annotated[
        float, option("Time to fetch a picture, in seconds, redirects included.", GROUP, gt=0, le=3600)
    ] = 10.0
    media_max_bytes: Annotated[
        int, option("Maximum size of a picture's file, in bytes.", GROUP, ge=1 << 10, le=1 << 30)
    ] = 32 << 20
    media_max_pixels: Annotated[
        int, option("Maximum width times height of a picture.", GROUP, ge=1, le=1 << 30)
    ] = 64_000_000
    limit_mm_per_prompt: Annotated[
        str | None,
        option(
            f"Pictures of one request, as JSON: '{{\"image\": 4}}'. Default: {MAX_IMAGES:,}.",
            GROUP,
            metavar="JSON",
        ),
    ] = None
    mm_processor_kwargs: Annotated[
        str | None,
        option(
            "Arguments of the model's processor, as a JSON object, such as '{\"max_pixels\": 1003520}'.",
            GROUP,
            metavar="JSON",
        ),
    ] = None
    media_python: Annotated[
        str | None,
        option(
            "Python interpreter of the media workers, for one of vLLM's environment. Default: the server's.",
            GROUP,
            metavar="FILE",
        ),
    ] = None
    language_model_only: Annotated[
        bool, option("Serve a model that takes pictures for text only, without its vision part.", GROUP)
    ] = False
    encoder_cache_tokens: Annotated[
        int,
        option(
            "Features of encoded pictures that an engine keeps, in tokens; a picture has at most so many.",
            GROUP,
            ge=1,
            le=1 << 30,
        ),
    ] = 16384


class _ImageLimit(msgspec.Struct):
    count: Annotated[int, Meta(ge=0)] = MAX_IMAGES


_Limit = Annotated[int, Meta(ge=0)] | _ImageLimit


def read_mm_limits(text: str | None) -> int:
    """``--limit-mm-per-prompt``, as vLLM writes it: pictures of one request. Those of video and audio say
    nothing. Raises ValueError."""
    if text is None:
        return MAX_IMAGES
    try:
        limit = msgspec.json.decode(text, type=dict[str, _Limit]).get("image", MAX_IMAGES)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(
            f'--limit-mm-per-prompt {text[:200]}: {error}; it takes a JSON object such as {{"image": 4}}'
        ) from None
    return min(MAX_IMAGES, limit if isinstance(limit, int) else limit.count)


def read_processor_kwargs(text: str | None) -> dict[str, Any]:
    """``--mm-processor-kwargs``, read. Raises ValueError."""
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--mm-processor-kwargs {text[:200]}: {error}; it takes a JSON object of the processor's "
            'arguments, such as {"max_pixels": 1003520}'
        ) from None
