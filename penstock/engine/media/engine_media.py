"""An engine's pictures: which may be computed in a step, and the features that a step computes with.

The scheduler asks how much of a chunk can be computed (:meth:`EngineMedia.fit`), and so plans which pictures
are encoded; whoever runs the step takes the features (:meth:`EngineMedia.features`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.engine.base import RequestRejected
from penstock.engine.batch.slots import SlotTable
from penstock.engine.media.encoder_cache import EncoderCache
from penstock.engine.media.page_supply import PageSupply, Want
from penstock.engine.media.rope_positions import RopePositions
from penstock.engine.media.spans import FeatureRows, MediaSpans, Picture
from penstock.engine.schedule.batch import Batch
from penstock.wire.arrays import I32
from penstock.wire.media.items import MediaInfo, MediaItem
from penstock.wire.messages import Submit

if TYPE_CHECKING:
    from penstock.media.pages import Pages


class MediaEncoder(Protocol):
    """The part of a model that makes features of pictures."""

    def encode(self, item: MediaItem, pages: Pages) -> Any:
        """float[features, hidden size], one row for each image token of the picture, in order; what the
        model has in place of their embeddings. The value is kept as it is. Raises ValueError for arrays that
        the model cannot take: the stream fails."""
        ...


class EngineMedia:
    """The pictures of an engine's streams, and the features of pictures that it keeps."""

    def __init__(
        self,
        table: SlotTable,
        token: int,
        encoder: MediaEncoder,
        pages: PageSupply,
        *,
        cache_tokens: int,
        step_tokens: int,
        whole_spans: bool = False,
        rope_merge: int = 0,
    ) -> None:
        """``token``: the image token. ``cache_tokens``: features that are kept; ``step_tokens``: tokens of a
        step. ``whole_spans``: the tokens of a picture see each other in both directions, so that a span is
        computed at once. ``rope_merge``: patches in height, and in width, that make a feature, of a model
        whose features have positions in time, height and width; 0: of one whose features have not."""
        self.info = MediaInfo(token, cache_tokens)
        self.spans = MediaSpans(table, token)
        self.cache = EncoderCache(cache_tokens)
        self.whole_spans = whole_spans
        self.rope = RopePositions(table.size, token, rope_merge) if rope_merge else None
        self.pages = pages
        self.encoded = 0
        """Pictures encoded since the start."""
        self.queries = self.hits = 0
        """Pictures of streams since the start, and those whose features or KV blocks there were."""
        self._encoder = encoder
        self._table = table
        self._step_tokens = step_tokens
        self.planned = 0
        """Pictures that this step encodes."""
        self.wanted = 0
        """Tokens of a span that has to be computed at once, and for which this step had no room left."""
        self._room = 0
        """Features that this step may encode beside those of its first picture."""

    # -- streams

    def check(self, request: Submit) -> None:
        """Raises RequestRejected for pictures that the engine could never compute."""
        prompt = np.frombuffer(request.prompt, "<i4")
        for index, item in enumerate(request.media):
            features = int(
                np.count_nonzero(prompt[item.offset : item.offset + item.length] == self.info.token)
            )
            where = f"media[{index}]"
            if not features:
                raise RequestRejected(
                    f"{where}: none of its {item.length} tokens is the image token, {self.info.token}"
                )
            if features > self.cache.budget:
                raise RequestRejected(
                    f"{where}: {features} image tokens, but the encoder cache has room for "
                    f"{self.cache.budget}; send a smaller picture or serve with more --encoder-cache-tokens"
                )
            if self.whole_spans and item.length > self._step_tokens:
                raise RequestRejected(
                    f"{where}: {item.length} tokens, which this model computes in one step, but steps have "
                    f"at most {self._step_tokens}; serve with more --max-num-batched-tokens"
                )
        if self.rope is not None:
            try:
                self.rope.check(prompt, request.media)
            except ValueError as error:
                raise RequestRejected(str(error)) from None

    def missing(self, server: int, media: Sequence[MediaItem], start: int) -> Want | None:
        """What a stream has to wait for whose first ``start`` tokens are computed; None: it may begin. The
        API server is asked for all pages that are missing."""
        lacking = [
            item.key
            for item in media
            if item.offset + item.length > start
            and item.key not in self.cache
            and not self.pages.has(server, item)
        ]
        return (server, lacking[0]) if lacking else None

    def begin(self, slot: int, media: Sequence[MediaItem], start: int) -> None:
        """A stream with these pictures has the slot, and its prompt is in the table; its first ``start``
        tokens are computed."""
        self.spans.begin(slot, media)
        if self.rope is not None and media:
            self.rope.begin(slot, self._table.history[slot], media)
        for picture in self.spans.within(slot, 0, start):
            if picture.positions[-1] < start:
                self._count(picture, found=True)

    def waits_for(self, want: Want, computed: I32) -> list[int]:
        """Slots of the API server's streams that need the picture yet. ``computed``: tokens of each slot's
        history."""
        server, key = want
        return [
            slot
            for slot in np.flatnonzero(self.spans.end > computed).tolist()
            if self._table.server[slot] == server
            and any(
                item.key == key and item.offset + item.length > computed[slot] for item in self.spans.of(slot)
            )
        ]

    def release(self, slot: int) -> None:
        """The slot's stream has ended."""
        self.rewind(slot)
        self.spans.release(slot)
        if self.rope is not None:
            self.rope.end(slot)

    def rewind(self, slot: int) -> None:
        """What was computed of the slot's stream is lost."""
        self.cache.hold(slot, None)

    # -- a step

    def begin_step(self, decodes: int) -> None:
        """A step is scheduled that has so many decodes. Beside them it encodes at most one picture."""
        self.cache.begin_step()
        self.pages.begin_step()
        self._room = 0 if decodes else self._step_tokens
        self.planned = self.wanted = 0

    def fit(self, slot: int, start: int, count: int) -> int:
        """How many of the ``count`` tokens from ``start`` on the step can compute, with the pictures that are
        among them."""
        if start >= self.spans.end[slot]:
            return count
        stop, within = start + count, None
        for picture in self.spans.within(slot, start, stop):
            if self.whole_spans and picture.end > stop:
                stop = max(start, picture.item.offset)
                if stop == start:
                    self.wanted = max(self.wanted, picture.end - start)
                break
            first, last = np.searchsorted(picture.positions, (start, stop)).tolist()
            if first == last:
                continue  # marks alone
            if not self._plan(slot, picture):
                stop = max(start, picture.item.offset if self.whole_spans else int(picture.positions[first]))
                break
            if last < len(picture.positions):
                within = picture.item.key
        self.cache.hold(slot, within)
        return stop - start

    def _plan(self, slot: int, picture: Picture) -> bool:
        """Whether the step can have the picture's features."""
        item, features = picture.item, len(picture.positions)
        found = self.cache.use(item.key)
        if not found:
            if self.planned and features > self._room:
                return False
            if not self.pages.has(int(self._table.server[slot]), item, keep=True):
                return False
            if not self.cache.make_room(item.key, features):
                return False
            self.planned += 1
            self._room -= features
        self._count(picture, found=found)
        return True

    def _count(self, picture: Picture, *, found: bool) -> None:
        if not picture.counted:
            picture.counted = True
            self.queries += 1
            self.hits += found

    def cut_drafts(self, slots: NDArray[np.intp], drafts: I32) -> I32:
        """int32[n]: the drafts (lengths, behind the slots' histories) up to the first image token, which no
        model samples: text that comes again may have been followed by a picture."""
        columns = np.arange(int(drafts.max(initial=1)), dtype=np.int32)
        at = np.minimum(self._table.length[slots, None] + columns, self._table.max_model_len - 1)
        found = (self._table.history[slots[:, None], at] == self.info.token) & (columns < drafts[:, None])
        cut: I32 = np.where(found.any(1), found.argmax(1), drafts).astype(np.int32)
        return cut

    def features(self, batch: Batch) -> Iterator[tuple[FeatureRows, Any]]:
        """What the batch's tokens need of their pictures, and each picture's features, which are encoded if
        they are not there. Raises ValueError and LookupError."""
        for rows in self.spans.in_batch(batch):
            value = self.cache.get(rows.item.key)
            if value is None:
                value = self._encoder.encode(rows.item, self.pages.read(rows.item))
                self.encoded += 1
                self.cache.put(rows.item.key, value)
            if len(value) != rows.total:
                raise ValueError(f"the picture has {len(value)} features for {rows.total} image tokens")
            yield rows, value

    # -- everything

    def clear(self) -> None:
        """Forget all features: they are of other weights, or their memory is wanted."""
        self.cache.clear()

    def metrics(self) -> dict[str, float]:
        """Counters since the start, and the features that are kept."""
        return {
            "pictures_encoded_total": self.encoded,
            "encoder_cache_queries_total": self.queries,
            "encoder_cache_hits_total": self.hits,
            "encoder_cache_tokens": self.cache.used,
            "pages_wanted_total": self.pages.asked,
        }
