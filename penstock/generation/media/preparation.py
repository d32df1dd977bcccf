"""Prepares the pictures of a request before its prompt is tokenized, and puts them into the prompt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from penstock.generation.media.lifting import part_of
from penstock.generation.media.placeholders import Spliced, placed, splice
from penstock.generation.media.source import ImageSource
from penstock.generation.prompt.prompt_encoder import PromptEncoder
from penstock.generation.prompt.tokenizer import Tokenizer
from penstock.generation.prompt.turn_memory import NextTurn
from penstock.http.admission import unavailable
from penstock.http.errors import ApiError
from penstock.media.client import MediaClient, WantedPicture
from penstock.media.refused import Refused
from penstock.wire.media.worker import MediaDescription, MediaPrepared

ROOM_WAIT_S = 15.0
"""How long a request waits for its turn and for room in the store."""
_BASE64 = ";base64"


TURN_S = 5.0
"""How long one turn lasts: a host from which pictures come slowly is in nobody's way for longer."""


class _NoRoomError(Exception):
    """There is no room for a picture, as other requests have theirs in the store."""


class Pictures:
    """The prepared pictures of a request, and the leases of their pages."""

    def __init__(self, client: MediaClient, placeholder_id: int, description: MediaDescription) -> None:
        self._client = client
        self._placeholder_id = placeholder_id
        self._description = description
        self.prepared: list[MediaPrepared] = []
        """In the order of the prompt."""
        self._held: list[MediaPrepared] = []
        self._sizes: dict[bytes, int] = {}
        """Bytes of the pages of each picture that was looked at."""
        self._released = False

    @property
    def features(self) -> int:
        """Tokens of all pictures that are computed from features."""
        return sum(each.features for each in self.prepared)

    def recall(self, sources: Sequence[ImageSource], salt: str, parts: Sequence[memoryview] = ()) -> bool:
        """:meth:`prepare` pictures that have been prepared not long ago; False: it must wait for some. Raises
        ApiError."""
        for source in sources:
            known = self._client.recall(_wanted(source, salt, parts))
            if known is None:
                self.prepared.clear()
                self._release_all()
                return False
            self.prepared.append(known)
            self._held.append(known)
        self._client.counts.images["remembered"] += len(sources)
        return True

    async def prepare(
        self, sources: Sequence[ImageSource], salt: str, parts: Sequence[memoryview] = ()
    ) -> None:
        """Raises ApiError for the first picture that cannot be prepared. ``parts``: of the request's
        :class:`LiftedBody`."""
        wanted = [(source.field, _wanted(source, salt, parts)) for source in sources]
        if not self._client.crowded:
            await self._prepare_all(wanted)
        await self._prepare_in_turn(wanted)

    async def _prepare_all(self, wanted: Sequence[tuple[str, WantedPicture]]) -> None:
        work = [asyncio.ensure_future(self._prepare_one(*each)) for each in wanted]
        try:
            for each in work:  # all, so that it is known whether they could ever have room
                with contextlib.suppress(_NoRoomError):
                    self.prepared.append(await each)
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _prepare_in_turn(self, wanted: Sequence[tuple[str, WantedPicture]]) -> None:
        """Requests that hold some of their pictures would wait for each other's room: one at a time does."""
        try:
            async with asyncio.timeout(ROOM_WAIT_S):
                while len(self.prepared) < len(wanted):
                    self._release_all()
                    self.prepared = []
                    async with self._client.last_room():
                        await self._take_turn(wanted)
        except TimeoutError:
            text = "the media cache has no room (--media-cache)"
            raise _api_error(Refused("busy", text), wanted[0][0]) from None

    async def _take_turn(self, wanted: Sequence[tuple[str, WantedPicture]]) -> None:
        """Prepare one picture after the other, as many as there is time for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TURN_S):
                while len(self.prepared) < len(wanted):
                    with contextlib.suppress(_NoRoomError):
                        self.prepared.append(await self._prepare_one(*wanted[len(self.prepared)]))

    async def _prepare_one(self, field: str, picture: WantedPicture) -> MediaPrepared:
        try:
            prepared = await self._client.prepare(picture)
        except Refused as error:
            if error.size:
                self._check_fit(field, error.key, error.size)
                raise _NoRoomError from None
            raise _api_error(error, field) from None
        if self._released:  # the client has gone
            self._client.release(prepared.key)
        else:
            self._held.append(prepared)
            self._check_fit(field, prepared.key, prepared.size)
        return prepared

    def _check_fit(self, field: str, key: bytes, size: int) -> None:
        """Raises ApiError if the request's pictures would find no room in an empty store."""
        self._sizes[key] = size
        size = sum(self._sizes.values())
        if size > self._client.capacity:
            text = f"the request's images take {size} bytes or more when they are prepared"
            kept = f"{self._client.capacity} are kept (--media-cache)"
            raise _api_error(Refused("too_large", f"{text}, and {kept}"), field)

    def encode(
        self,
        encoder: PromptEncoder,
        text: str,
        add_special_tokens: bool,
        cache_salt: str | None,
        turn: NextTurn | None = None,
    ) -> Spliced:
        """The tokenized prompt with the pictures' tokens. The arguments: see :meth:`PromptEncoder.encode`.
        Raises ApiError."""
        where = placed(text, self._description)
        ids, _ = encoder.encode(where.text, add_special_tokens, cache_salt, turn)
        return splice(ids, self._placeholder_id, where, self.prepared)

    def release(self) -> None:
        """End the leases: no stream of the request runs."""
        self._released = True
        self._release_all()

    def _release_all(self) -> None:
        held, self._held = self._held, []
        for each in held:
            self._client.release(each.key)


class PicturePreparation:
    """Makes :class:`Pictures` for requests."""

    def __init__(self, client: MediaClient, description: MediaDescription, tokenizer: Tokenizer) -> None:
        """Raises ValueError if the tokenizer has no token for the placeholder."""
        found = tokenizer.raw.token_to_id(description.placeholder)
        if found is None:
            raise ValueError(
                f"the processor {description.processor} marks images by {description.placeholder!r}, which "
                "is no token of the model's tokenizer"
            )
        self._client = client
        self.description = description
        self.typical_tokens = client.typical_tokens
        self._placeholder_id = found

    def pictures(self) -> Pictures:
        """Those of one plan."""
        return Pictures(self._client, self._placeholder_id, self.description)

    async def close(self) -> None:
        """End the connections to media workers."""
        await self._client.close()


def _wanted(source: ImageSource, salt: str, parts: Sequence[memoryview]) -> WantedPicture:
    """Raises ApiError."""
    url = source.url
    if url[:5].lower() != "data:":
        return WantedPicture(url, b"", source.detail, salt)
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(_BASE64):
        raise ApiError(
            400,
            f"{source.field}: a data: URL is data:image/TYPE;base64,DATA; this one begins with "
            f"{head[:60]!r}.",
            param=source.field,
            code="invalid_image",
        )
    part = part_of(data) if parts else -1
    given = parts[part] if 0 <= part < len(parts) else data.encode("ascii", "replace")
    return WantedPicture("", given, source.detail, salt)


def _api_error(error: Refused, field: str) -> ApiError:
    message = f"{field}: {error.message}"
    if error.code == "busy":
        return unavailable(message, "media_busy")
    if error.code == "internal":
        return ApiError(500, message, param=field, code="media_error")
    return ApiError(400, message, param=field, code="invalid_image")
