"""Where the pictures of a conversation are in its prompt, and the tokens that take their places.

A chat template writes a *placeholder* for each picture: one added token. A user may write the same text, of
which the model then reads the token, as it would without pictures. Where that happens the text is rendered
once more, with a mark in its place. The mark becomes the placeholder again after the pictures are counted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from penstock.generation.request.schemas import Message
from penstock.http.errors import ApiError
from penstock.wire.media.items import MediaItem
from penstock.wire.media.worker import MediaDescription, MediaPrepared

_LITERAL = f"\ue000{secrets.token_hex(8)}\ue003"
"""Stands for a placeholder that a user has written."""
_encode = msgspec.json.Encoder().encode

Value = TypeVar("Value")


class Respell(Protocol):
    """Gives a value, of a type that msgspec decodes, in which marks stand for what users have written."""

    def __call__(self, value: Value, type: Any) -> Value: ...


def count_pictures(messages: Sequence[Message]) -> int:
    """How many parts of messages are pictures."""
    return sum(
        1
        for message in messages
        if type(message.content) is list
        for part in message.content
        if not isinstance(part, str) and part.type == "image"
    )


def with_pictures(
    text: str, messages: list[Message], placeholder: str, render: Callable[[Respell], str]
) -> str:
    """The prompt ``text`` of ``messages``, of which each placeholder is a picture's: see :func:`placed`.
    ``render`` makes the prompt of what the request has, spelled otherwise. Raises ApiError if the template
    does not show each picture once."""
    pictures = count_pictures(messages)
    if not pictures or text.count(placeholder) == pictures:
        return text

    def respell(value: Value, type: Any) -> Value:
        marked = _encode(value).replace(_in_json(placeholder), _in_json(_LITERAL))
        respelled: Value = msgspec.json.decode(marked, type=type)
        return respelled

    text = render(respell)
    shown = text.count(placeholder)
    if shown != pictures:
        raise ApiError(
            400,
            f"messages: there are {pictures} images, and the chat template shows {shown} of them.",
            param="messages",
        )
    return text


def _in_json(text: str) -> bytes:
    return _encode(text)[1:-1]


class PlacedText(NamedTuple):
    """A prompt's text as it is tokenized."""

    text: str
    ordinals: Sequence[int]
    """Which occurrences of the placeholder are pictures, from 0 on, ascending."""
    occurrences: int
    """Of the placeholder, pictures and others."""


def placed(text: str, description: MediaDescription) -> PlacedText:
    """The text of :func:`with_pictures`, with what the processor writes around pictures."""
    mark = description.placeholder
    around = f"{description.before}{mark}{description.after}"
    pieces = text.split(mark)
    if _LITERAL not in text:
        whole = text if around == mark else around.join(pieces)
        return PlacedText(whole, range(len(pieces) - 1), len(pieces) - 1)
    ordinals, at = [], 0
    for piece in pieces[:-1]:
        at += piece.count(_LITERAL)
        ordinals.append(at)
        at += 1
    occurrences = at + pieces[-1].count(_LITERAL)
    return PlacedText(around.join(pieces).replace(_LITERAL, mark), ordinals, occurrences)


class Spliced(NamedTuple):
    """A prompt with the tokens of its pictures."""

    ids: bytes
    """int32 little-endian."""
    media: tuple[MediaItem, ...]
    routed: bytes
    """``ids`` with the pictures' keys in their spans: prompts with other pictures have another beginning."""


def splice(ids: bytes, placeholder_id: int, where: PlacedText, pictures: Sequence[MediaPrepared]) -> Spliced:
    """Put the tokens of ``pictures`` in the places of their placeholders. ``ids``: int32 tokens of the placed
    text. Raises ApiError if the tokenizer does not spell every placeholder as its token."""
    tokens = np.frombuffer(ids, "<i4")
    places = np.flatnonzero(tokens == placeholder_id)
    if len(places) != where.occurrences or len(where.ordinals) != len(pictures):
        raise ApiError(
            500,
            f"The prompt has {len(places)} tokens that stand for images, and {where.occurrences} were "
            "written: the model's tokenizer and its processor do not fit together.",
            code="media_error",
        )
    pieces, routed, media = list[bytes](), list[bytes](), list[MediaItem]()
    begin = offset = 0
    for place, picture in zip((4 * places[list(where.ordinals)]).tolist(), pictures, strict=True):
        before = ids[begin:place]
        length = len(picture.ids) // 4
        offset += len(before) // 4
        media.append(MediaItem(picture.key, offset, length, picture.size, picture.grid))
        pieces += (before, picture.ids)
        routed += (before, (picture.key * (len(picture.ids) // len(picture.key) + 1))[: len(picture.ids)])
        offset += length
        begin = place + 4
    pieces.append(ids[begin:])
    routed.append(ids[begin:])
    return Spliced(b"".join(pieces), tuple(media), b"".join(routed))
