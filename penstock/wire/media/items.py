"""What a Submit says of the pictures in its prompt, and how an engine of another host gets their pages.

A picture is a set of *pages*: the arrays that a processor has made of it, in one sealed file of the host's
store (:mod:`penstock.media.store`), named by a key. Its tokens are in the prompt already.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

MAX_ITEMS = 1024
"""Pictures of one request: more than any model's context has room for."""
PIECE = 1 << 20
"""Bytes of pages in one message."""
MAX_PAGE_BYTES = 1 << 30
"""Bytes of one picture's pages."""

MediaKey: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=32)]
"""Digest of a picture's bytes, of the processor and its configuration, of the model's revision, and of the
tenant's salt."""
_Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]


class MediaItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One picture of a prompt."""

    key: MediaKey
    offset: _Count
    """Position in the prompt of the first token that stands for it."""
    length: Annotated[int, Meta(ge=1, lt=1 << 31)]
    """Tokens that stand for it. Those of them that are the model's image token get its features, in order;
    others are marks and are computed as text."""
    size: Annotated[int, Meta(ge=0, le=MAX_PAGE_BYTES)]
    """Bytes of the sealed file."""
    grid: Annotated[tuple[_Count, ...], Meta(max_length=3)] = ()
    """Patches in time, height and width, of models whose positions depend on them (Qwen2-VL); empty: they do
    not."""


Media: TypeAlias = Annotated[tuple[MediaItem, ...], Meta(max_length=MAX_ITEMS)]
"""The pictures of a prompt, in its order; their spans do not overlap."""


def media_fault(media: tuple[MediaItem, ...], tokens: int) -> str:
    """Why the spans do not fit a prompt of so many ``tokens``; empty: they do."""
    end = 0
    for item in media:
        if item.offset < end:
            return f"media: a span begins at {item.offset}, before the end of the one before, {end}"
        end = item.offset + item.length
    return f"media: a span ends at {end}, after the prompt's {tokens} tokens" if end > tokens else ""


class MediaInfo(msgspec.Struct, array_like=True, frozen=True):
    """What an engine takes besides text: pictures."""

    token: _Count
    """The token whose positions in a span get the picture's features."""
    encoder_tokens: _Count = 0
    """Features that its encoder cache holds: one picture has at most so many; 0: not known."""


class PagesWanted(msgspec.Struct, array_like=True, frozen=True, tag=27, gc=False):
    """Engine to API server: the engine lacks the pages of a stream that waits for them."""

    key: MediaKey


class PagePiece(msgspec.Struct, array_like=True, frozen=True, tag=8, gc=False):
    """API server to engine: a piece of a sealed file, in order. Without ``data`` at position 0: the API
    server lacks them, too."""

    key: MediaKey
    position: Annotated[int, Meta(ge=0, le=MAX_PAGE_BYTES)]
    data: Annotated[bytes, Meta(max_length=PIECE)]
    digest: Annotated[bytes, Meta(max_length=32)] = b""
    """With the last piece: BLAKE2b of 32 bytes over the whole file."""
