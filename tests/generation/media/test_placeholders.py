"""Pictures in rendered prompts, and their tokens in place of placeholders."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.generation.media.placeholders import Respell, placed, splice, with_pictures
from penstock.generation.request.schemas import Message, Part
from penstock.http.errors import ApiError
from penstock.wire.media.items import MediaItem
from penstock.wire.media.worker import MediaDescription, MediaPrepared

IMAGE = MediaDescription("<image>")


def rendered(messages: list[Message]) -> str:
    return "".join(
        part if isinstance(part, str) else "<image>" if part.type == "image" else part.text or ""
        for message in messages
        for part in message.content or ()
    )


def again(messages: list[Message]) -> Callable[[Respell], str]:
    return lambda respell: rendered(respell(messages, list[Message]))


def user(*contents: str | None) -> Message:
    """None: a picture."""
    parts: list[str | Part] = [
        Part(type="image") if each is None else Part(type="text", text=each) for each in contents
    ]
    return Message(role="user", content=parts)


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def test_a_text_without_pictures_keeps_what_the_user_wrote() -> None:
    messages = [user("see <image>")]
    assert with_pictures("see <image>", messages, "<image>", again(messages)) == "see <image>"


def test_placeholders_that_a_user_wrote_are_no_pictures() -> None:
    messages = [user("a <image> b", None, 'c "<image>"', None)]
    text = with_pictures(rendered(messages), messages, "<image>", again(messages))
    where = placed(text, IMAGE)
    assert where.text == 'a <image> b<image>c "<image>"<image>'
    assert (list(where.ordinals), where.occurrences) == ([1, 3], 4)


def test_texts_of_the_processor_stand_around_pictures_alone() -> None:
    messages = [user("<image>", None)]
    text = with_pictures(rendered(messages), messages, "<image>", again(messages))
    assert placed(text, MediaDescription("<image>", "[", "]")).text == "<image>[<image>]"


@pytest.mark.parametrize("shown", ["", "<image><image>"])
def test_a_template_that_does_not_show_each_picture_is_refused(shown: str) -> None:
    with pytest.raises(ApiError, match="there are 1 images, and the chat template shows"):
        with_pictures(shown, [user(None)], "<image>", lambda respell: shown)


def test_tokens_of_pictures_take_the_places_of_placeholders() -> None:
    where = placed("x<image>y<image>", IMAGE)
    pictures = [
        MediaPrepared(1, b"k" * 16, 64, ids(7, 7, 8), (1, 2, 3)),
        MediaPrepared(2, b"l" * 16, 65, ids(9)),
    ]
    spliced = splice(ids(1, 5, 2, 5), 5, where, pictures)
    assert spliced.ids == ids(1, 7, 7, 8, 2, 9)
    assert spliced.media == (
        MediaItem(b"k" * 16, 1, 3, 64, (1, 2, 3)),
        MediaItem(b"l" * 16, 5, 1, 65),
    )
    assert spliced.routed == ids(1) + b"k" * 12 + ids(2) + b"l" * 4


def test_a_tokenizer_that_does_not_know_the_placeholder_is_an_error() -> None:
    with pytest.raises(ApiError, match="0 tokens that stand for images, and 1 were written"):
        splice(ids(1, 2), 5, placed("<image>", IMAGE), [MediaPrepared(1, b"k" * 16, 1, ids(7))])
