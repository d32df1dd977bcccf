"""Pictures in the prompts of a synthetic engine: encoded for a while each, and part of what tokens are drawn
from."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.config.serve import ServeConfig
from penstock.engine.base import StreamFailure
from penstock.engine.batch.slots import SlotTable
from penstock.engine.media.engine_media import EngineMedia
from penstock.engine.media.page_supply import PageSupply
from penstock.engine.schedule.batch import EMPTY, Batch
from penstock.engine.schedule.waiting_queue import WaitingQueue, WaitingStream
from penstock.wire.media.items import MediaItem
from penstock.wire.messages import Submit

if TYPE_CHECKING:
    from penstock.media.pages import Pages


class SyntheticPictures:
    """The streams whose pictures are being encoded; their prompts are prefilled after that.

    Features depend on the picture's key and their place in it, and become one number per stream, by which
    :class:`~penstock.engine.synthetic.draws.TokenDraws` draws other tokens.
    """

    def __init__(self, table: SlotTable, token: int, pages: PageSupply, config: ServeConfig) -> None:
        """``token``: the image token."""
        self.pending: dict[int, int] = {}
        """By slot, how many tokens of the prompt are computed."""
        self.media = EngineMedia(
            table,
            token,
            self,
            pages,
            cache_tokens=config.encoder_cache_tokens,
            step_tokens=config.max_num_batched_tokens,
        )
        self._table = table
        self._encode_s = config.synthetic_encode_ms / 1000
        self._busy_s = 0.0

    def encode(self, item: MediaItem, pages: Pages) -> NDArray[np.uint64]:
        """uint64[features]"""
        self._busy_s += self._encode_s
        return np.arange(1, pages.facts.features + 1, dtype=np.uint64) * np.uint64(1 + zlib.crc32(item.key))

    # -- streams

    def pop_ready(self, waiting: WaitingQueue) -> WaitingStream | None:
        """Take out the first stream whose pictures' pages are there; those before it are held."""
        while (first := next(iter(waiting), None)) is not None:
            want = self.media.missing(first.server, first.request.media, 0)
            if want is None:
                return waiting.pop()
            waiting.hold(first, want)
        return None

    def begin(self, slot: int, request: Submit) -> bool:
        """A stream gets a slot. Returns whether it has pictures, and is not to be prefilled before them."""
        if request.media:
            self.media.begin(slot, request.media, 0)
            self.pending[slot] = 0
        return bool(request.media)

    def release(self, slot: int) -> None:
        """The stream leaves its slot."""
        self.pending.pop(slot, None)
        self.media.release(slot)

    def withdraw(self, slots: Iterable[int]) -> None:
        """Encode no more of their pictures."""
        for slot in slots:
            self.pending.pop(slot, None)

    def clear(self) -> None:
        """All streams have left."""
        for slot in range(self._table.size):
            self.release(slot)

    def settle(
        self, waiting: WaitingQueue, fail: Callable[[int, str, str], StreamFailure]
    ) -> list[StreamFailure]:
        """Let streams look again whose pages have come; end those whose pages will not come."""
        ended = []
        computed = np.full(self._table.size, self._table.max_model_len, np.int32)
        for want, code in self.media.pages.take_settled():
            message = f"the pages of a picture did not come: {code}"
            for stream in waiting.release(want):
                if code:
                    waiting.fail(stream, code, message)
            computed[[*self.pending]] = [*self.pending.values()]
            for slot in self.media.waits_for(want, computed) if code else ():
                ended.append(fail(slot, code, message))
        return ended

    # -- a step

    def advance(self, decodes: int, see: Callable[[int, int], None]) -> Iterable[int]:
        """Encode what the step may, and yield the slots whose pictures are all encoded. ``see`` takes a slot,
        and a number made of features."""
        if self.pending:
            self.media.begin_step(decodes)
        for slot, start in list(self.pending.items()):
            stop = start + self.media.fit(slot, start, int(self._table.prompt_len[slot]) - start)
            for rows, value in self.media.features(_part(slot, start, stop - start)):
                at = rows.rows.astype(np.uint64) + np.uint64(start + 1)
                see(slot, int((value[rows.first : rows.last] * at).sum()))
            self.pending[slot] = stop
            if stop == self._table.prompt_len[slot]:
                del self.pending[slot]
                yield slot

    def take_busy_s(self) -> float:
        """Seconds that pictures were encoded for since the last call."""
        busy, self._busy_s = self._busy_s, 0.0
        return busy


def _part(slot: int, start: int, count: int) -> Batch:
    return Batch(
        slots=np.array([slot], np.intp),
        start=np.array([start], np.int32),
        count=np.array([count], np.int32),
        singles=0,
        decodes=0,
        samples=EMPTY.samples,
        generations=EMPTY.generations,
    )
