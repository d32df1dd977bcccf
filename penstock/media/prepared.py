"""What media workers need of a processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from numpy.typing import NDArray

from penstock.media.pages import PageFacts
from penstock.wire.media.worker import MediaDescription

if TYPE_CHECKING:
    from PIL.Image import Image


class PreparedPicture(NamedTuple):
    """The pages of a picture, before they are sealed."""

    facts: PageFacts
    arrays: dict[str, NDArray[Any]]


class PictureProcessor(Protocol):
    """Makes of pictures what a model's encoder takes."""

    description: MediaDescription
    digest: bytes
    """Equal digests make equal pages of equal pictures."""

    def takes_detail(self, detail: str) -> str:
        """What a value of OpenAI's ``detail`` asks for here: equal texts make equal pages."""
        ...

    def prepare(self, image: Image, detail: str, source_bytes: int) -> PreparedPicture:
        """The pages of an RGB picture; ``detail`` is one of :meth:`takes_detail`. Raises ValueError for one
        that the model does not take."""
        ...
