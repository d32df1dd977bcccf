"""Content that models cannot see: they read a sentence in its place, and the client gets a warning.

Tools show images and files to agents, which send them with every later request. One that is refused would end
the conversation forever; a server with ``--strict-requests`` refuses it all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.generation.media.source import ImageSource
from penstock.generation.request.schemas import Message, Part
from penstock.http.errors import ApiError

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
"""What stands in the result of a tool for an image that the model sees."""


def joined(contents: Sequence[str | Part]) -> str | list[str | Part]:
    """Texts as one text, a line each; with images among them, as parts."""
    texts = [each for each in contents if isinstance(each, str)]
    if len(texts) == len(contents):
        return "\n".join(texts)
    return [Part(type="text", text=each) if isinstance(each, str) else each for each in contents]


def placeholder(kind: str) -> str:
    """What the model reads in the place of an ``image``, a ``document``, a ``recording`` or a ``video``."""
    article = "An" if kind[0] in "aeiou" else "A"
    return f"[{article} {kind} was sent here. This model reads text only and cannot {_verb(kind)} it.]"


class UnsupportedContent:
    """What of a conversation the model cannot see."""

    def __init__(self, *, refused: bool = False, sees_images: bool = False) -> None:
        """``refused``: such content is an error. ``sees_images``: the model takes pictures."""
        self._refused = refused
        self.sees_images = sees_images
        self.images: list[ImageSource] = []
        """The pictures that the model sees, in the order of the conversation."""
        self._kinds: set[str] = set()

    def see(self, image: ImageSource) -> Part:
        """The part that stands for a picture in a message: the chat template marks its place."""
        self.images.append(image)
        return Part(type="image")

    def add(self, kind: str, field: str) -> str:
        """Note that there is such content, at the path ``field``. Returns what the model reads in its place.
        Raises ApiError if it is refused."""
        if self._refused:
            raise ApiError(
                400,
                f"{field}: the model reads text only and cannot {_verb(kind)} {kind}s; this server refuses "
                "what it would have to leave out (--strict-requests).",
                param=field,
            )
        self._kinds.add(kind)
        return placeholder(kind)

    def replace_parts(self, messages: list[Message]) -> None:
        """Put what the model reads in the place of parts that it cannot see. The messages themselves stay as
        they are: a later turn may have them again. Raises ApiError."""
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
        return f"{field}: the model reads text only and cannot {cannot}; it was told so in their place"

    def _seen(self, part: str | Part, field: str) -> str | Part:
        if isinstance(part, str) or part.type not in UNSUPPORTED_PARTS:
            return part
        return Part(type="text", text=self.add(UNSUPPORTED_PARTS[part.type], field))


def _verb(kind: str) -> str:
    return "hear" if kind == "recording" else "see"
