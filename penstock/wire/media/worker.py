"""Messages between API servers and the media workers of their host, over a Unix socket of the run directory.

================  ==========  ==========  ================================
message           sender      receiver    answer
================  ==========  ==========  ================================
MediaDescription  worker      API server  none
PrepareMedia      API server  worker      MediaPrepared; or MediaRefused
AbandonMedia      API server  worker      none, and none to the request
MediaPrepared     worker      API server  none
MediaRefused      worker      API server  none
================  ==========  ==========  ================================

A message is a u32 (little-endian) with the length of its msgpack and a u32 with that of the bytes that
follow, then both. Only PrepareMedia has such bytes: the picture as the request had it.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from penstock.wire.media.items import MediaKey

MAX_MESSAGE_BYTES = 4 << 20
"""Of msgpack: the token ids of a picture are the longest part."""
_Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]


def media_socket(run_dir: str, worker: int) -> str:
    """Path of a worker's socket."""
    return f"{run_dir}/media-{worker}.sock"


class MediaDescription(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """First message of a worker on a connection: how the model's processor puts pictures into prompts."""

    placeholder: str
    """What the chat template writes for a picture: one added token."""
    before: str = ""
    """Text that the processor puts before the tokens of a picture (Gemma 3: two newlines)."""
    after: str = ""
    processor: str = ""
    """Its name, for people."""


class PrepareMedia(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Fetch, decode and preprocess a picture, unless the store has it."""

    number: _Count
    """Of this request, on its connection; the answer has it."""
    url: str = ""
    """http:, https: or file: URL; empty: the picture's bytes follow."""
    base64: bool = False
    """Whether the bytes that follow are base64, as in a data: URL."""
    detail: str = "auto"
    """OpenAI's: low, high or auto."""
    salt: str = ""
    """Tenant and cache salt: pages are not shared across it."""


class MediaPrepared(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """The pages are in the store, and stay there as long as somebody has a lease of them."""

    number: _Count
    key: MediaKey
    size: int
    """Bytes of the sealed file."""
    ids: bytes
    """int32 little-endian: the tokens that take the placeholder's place, marks included."""
    grid: tuple[int, ...] = ()
    features: _Count = 0
    """How many of ``ids`` are the image token."""
    found: bool = False
    """Whether the store had it: nothing was decoded."""
    source_bytes: _Count = 0
    """Size of the picture's file."""
    pixels: _Count = 0
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Wall time to fetch, to decode and to preprocess it."""
    pool_bytes: int = 0
    """Bytes in the store then."""


class AbandonMedia(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Nobody waits for this picture any more."""

    number: _Count
    """Of the PrepareMedia; one that is answered already is passed over."""


Refusal: TypeAlias = Literal[
    "invalid", "too_large", "forbidden", "unreachable", "timeout", "busy", "internal"
]
"""invalid: it is no picture that is served; too_large: beyond a limit; forbidden: not a source that the
operator allows; unreachable, timeout: its host; busy: no room; internal: a fault of the server's."""


class MediaRefused(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """There are no pages. ``message`` is for the client: it names the value and what is allowed, and no
    field."""

    number: _Count
    code: Refusal
    message: str
    key: Annotated[bytes, Meta(max_length=64)] = b""
    size: int = 0
    """Of the pages that found no room, if that is why."""


ToMediaWorker: TypeAlias = PrepareMedia | AbandonMedia
FromMediaWorker: TypeAlias = MediaDescription | MediaPrepared | MediaRefused
