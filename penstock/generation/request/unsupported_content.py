"""What there is in conversations besides text: pictures, which some models see, and what none can see.

The model reads a sentence in its place, and the client gets a warning.

Tools show images and files to agents, which send them with every later request. One that is refused would end
the conversation forever; a server with ``--strict-requests`` refuses it all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeGuard

from msgspec.structs import replace

from penstock.generation.media.source import ImageSource, image_at
from penstock.generation.request.schemas import Message, Part
from penstock.http.errors import ApiError, not_served
from penstock.wire.media.items import MAX_ITEMS

UNSUPPORTED_PARTS = {
    "image": "image",
    "image_url": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "audio": "recording",
    "audio_url": "recording",
    "audio_embeds": "recording",
    "input_audio": "recording",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "file": "document",
    "input_file": "document",
}
"""Types of parts in OpenAI's and vLLM's APIs and in messages for transformers, and what they show."""

IMAGE_FOLLOWS = "[An image, which the next message has.]"
"""What stands for an image where the model cannot see one, in the result of a tool for instance."""
_TEXT, _TEXT_AND_IMAGES = "text only", "text and images only"
_UNSERVED = ("image_pil", "image_embeds")


def is_image(part: str | Part) -> TypeGuard[Part]:
    """Whether a part stands for a picture that the model sees; ``image_url`` is then its number."""
    return isinstance(part, Part) and part.type == "image"


def joined(contents: Sequence[str | Part]) -> str | list[str | Part]:
    """Texts as one text, a line each; with images among them, as parts."""
    texts = [each for each in contents if isinstance(each, str)]
    if len(texts) == len(contents):
        return "\n".join(texts)
    return [Part(type="text", text=each) if isinstance(each, str) else each for each in contents]


def placeholder(kind: str, reads: str = _TEXT) -> str:
    """What the model reads in the place of an ``image``, a ``document``, a ``recording`` or a ``video``."""
    article = "An" if kind[0] in "aeiou" else "A"
    return f"[{article} {kind} was sent here. This model reads {reads} and cannot {_verb(kind)} it.]"


class UnsupportedContent:
    """What there is in a conversation besides text, and what of it the model cannot see."""

    def __init__(self, *, refused: bool = False, sees_images: bool = False, most: int = MAX_ITEMS) -> None:
        """``refused``: what the model cannot see is an error. ``sees_images``: it takes pictures, ``most`` of
        them in a conversation."""
        self._refused = refused
        self._most = most
        self._reads = _TEXT_AND_IMAGES if sees_images else _TEXT
        self.sees_images = sees_images
        self.images: list[ImageSource] = []
        """The pictures of the conversation, in its order."""
        self.shown: list[int] = []
        """Numbers of those that the prompt shows, in its order: set where it is rendered."""
        self._own: dict[int, Part] = {}
        """The parts that stand for them, by identity."""
        self._kinds: set[str] = set()

    @property
    def shown_images(self) -> list[ImageSource]:
        """The pictures that the prompt shows, in its order."""
        return [self.images[number] for number in self.shown]

    def see(self, image: ImageSource) -> Part:
        """The part that stands for a picture in a message: the chat template marks its place. Raises
        ApiError."""
        if len(self.images) >= self._most:
            message = (
                f"{image.field}: a request may have at most {self._most} images (--limit-mm-per-prompt)."
            )
            raise ApiError(400, message, param=image.field)
        part = Part(type="image", image_url=len(self.images))
        self._own[id(part)] = part
        self.images.append(image)
        return part

    def note_shown(self, messages: Sequence[Message]) -> None:
        """A prompt of these messages has been made."""
        self.shown = numbers_of(messages) if self.images else []

    def add(self, kind: str, field: str) -> str:
        """Note that there is such content, at the path ``field``. Returns what the model reads in its place.
        Raises ApiError if it is refused."""
        if self._refused:
            raise ApiError(
                400,
                f"{field}: the model reads {self._reads} and cannot {_verb(kind)} {kind}s; this server "
                "refuses what it would have to leave out (--strict-requests).",
                param=field,
            )
        self._kinds.add(kind)
        return placeholder(kind, self._reads)

    def replace_parts(self, messages: list[Message]) -> None:
        """Put what the model sees or reads in the place of parts that are no text. The messages themselves
        stay as they are: a later turn may have them again. Raises ApiError."""
        for number, message in enumerate(messages):
            if isinstance(message.content, list):
                field = f"messages[{number}].content"
                parts = enumerate(message.content)
                seen = [self._seen(part, f"{field}[{place}]") for place, part in parts]
                if seen != message.content:
                    messages[number] = replace(message, content=seen)

    def warning(self, field: str) -> str | None:
        """For the client; ``field`` has the conversation."""
        if not self._kinds:
            return None
        kinds: dict[str, list[str]] = {}
        for kind in sorted(self._kinds):
            kinds.setdefault(_verb(kind), []).append(f"{kind}s")
        cannot = " or ".join(f"{verb} {', '.join(names)}" for verb, names in kinds.items())
        return f"{field}: the model reads {self._reads} and cannot {cannot}; it was told so in their place"

    def _seen(self, part: str | Part, field: str) -> str | Part:
        if isinstance(part, str) or part.type not in UNSUPPORTED_PARTS or id(part) in self._own:
            return part
        kind = UNSUPPORTED_PARTS[part.type]
        if kind == "image" and self.sees_images:
            return self.see(_source(part, field))
        return Part(type="text", text=self.add(kind, field))


def _source(part: Part, field: str) -> ImageSource:
    """The picture of a part as OpenAI's, vLLM's and transformers' messages have it. Raises ApiError."""
    if part.type in _UNSERVED:
        raise not_served(f"{field}.type", f"{part.type} is not: send the image itself, as image_url")
    for name in ("image_url", "image", "url"):
        given = getattr(part, name)
        if isinstance(given, dict):
            place = f"{field}.{name}"
            return image_at(given.get("url"), f"{place}.url", given.get("detail"), f"{place}.detail")
        if given is not None:
            return image_at(given, f"{field}.{name}", part.detail, f"{field}.detail")
    lacks = "uuid names no image that this server has kept: " if part.uuid is not None else ""
    raise ApiError(400, f"{lacks}{field}.image_url is missing.", param=f"{field}.image_url")


def numbers_of(messages: Sequence[Message]) -> list[int]:
    """The numbers of the pictures in messages, in their order."""
    lists = (message.content for message in messages if type(message.content) is list)
    return [part.image_url for parts in lists for part in parts if is_image(part)]


def images_follow(messages: Sequence[Message], kinds: Collection[str]) -> list[Message]:
    """The messages with pictures in those of the ``kinds`` alone, user messages among them: the pictures of
    others, such as results of tools, are in the user's message that follows."""
    placed: list[Message] = []
    waiting: list[str | Part] = []
    for message in messages:
        if waiting and message.role != "tool":
            if message.role == "user":
                message = replace(message, content=[*waiting, *as_parts(message.content)])
            else:
                placed.append(Message("user", waiting))
            waiting = []
        content = message.content
        moved = waiting or message.role not in kinds
        if moved and isinstance(content, list) and any(map(is_image, content)):
            waiting += filter(is_image, content)
            content = [Part("text", IMAGE_FOLLOWS) if is_image(part) else part for part in content]
            message = replace(message, content=content)
        placed.append(message)
    return [*placed, Message("user", waiting)] if waiting else placed


def as_parts(content: str | list[str | Part] | None) -> list[str | Part]:
    """Content as parts."""
    if isinstance(content, str):
        return [Part(type="text", text=content)]
    return content or []


def _verb(kind: str) -> str:
    return "hear" if kind == "recording" else "see"
