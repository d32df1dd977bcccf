"""Positions of tokens in time, height and width: what the rotary embedding of Qwen2-VL takes (M-RoPE).

A picture of h by w features takes as many positions as its longer side, and its features lie on a grid of
them; text behind it goes on from there. So a text token is behind its place in the history by one number for
each stream, its *delta*; only the features of pictures have three positions that differ. (Wang et al.:
Qwen2-VL, 2024, 2.1.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.schedule.batch import Batch
from penstock.wire.arrays import I32
from penstock.wire.media.items import MediaItem

Ints = NDArray[np.int64]


def rope_positions(prompt: I32, media: Sequence[MediaItem], token: int, merge: int) -> tuple[I32, int]:
    """int32[3, P]: positions in time, height and width of a prompt's tokens up to the end of its last
    picture; and the delta, which those behind add to their place in the history.

    prompt: int32[N] token ids; ``token``: the one that stands for a feature; ``merge``: patches in height,
    and in width, that make a feature. Raises ValueError where the features of a picture are not those of its
    grid.
    """
    pieces: list[NDArray[np.int32]] = []
    place = following = 0
    """In the history, and the position of the text there."""
    for number, item in enumerate(media):
        features = np.flatnonzero(prompt[item.offset : item.offset + item.length] == token) + item.offset
        time, height, width = item.grid if len(item.grid) == 3 else (0, 0, 0)
        shape = time, height // merge, width // merge
        count = int(np.prod(shape))
        first = int(features[0]) if len(features) else item.offset
        if not count or len(features) != count or int(features[-1]) - first + 1 != count:
            raise ValueError(
                f"media[{number}]: a grid of {list(item.grid)} patches has {count} features next to each "
                f"other, the prompt has {len(features)} tokens of id {token} in its span"
            )
        text = np.arange(following, following + first - place, dtype=np.int32)
        following += first - place
        grid = np.indices(shape, np.int32).reshape(3, count) + np.int32(following)
        pieces += [np.broadcast_to(text, (3, len(text))), grid]
        place, following = first + count, following + max(shape[1:])
    return np.concatenate(pieces, 1) if pieces else np.zeros((3, 0), np.int32), following - place


class RopePositions:
    """Those of the running streams, by slot. Streams without pictures cost nothing, and decodes with pictures
    one sum over the batch."""

    def __init__(self, slots: int, token: int, merge: int) -> None:
        """``token`` and ``merge``: see :func:`rope_positions`."""
        self._token = token
        self._merge = merge
        self._delta = np.zeros(slots, np.int64)
        self._ends = np.zeros(slots, np.int32)
        """Where the last picture of each slot ends; 0: it has none."""
        self._prompts: dict[int, I32] = {}
        """By slot: positions up to the end of the last picture."""

    def check(self, prompt: I32, media: Sequence[MediaItem]) -> None:
        """Raises ValueError for pictures that :meth:`begin` could not take."""
        rope_positions(prompt, media, self._token, self._merge)

    def begin(self, slot: int, prompt: I32, media: Sequence[MediaItem]) -> None:
        """The slot has a stream with pictures, which have been checked."""
        self._prompts[slot], self._delta[slot] = rope_positions(prompt, media, self._token, self._merge)
        self._ends[slot] = self._prompts[slot].shape[1]

    def end(self, slot: int) -> None:
        """The slot's stream has left; it may have had no pictures."""
        self._delta[slot] = self._ends[slot] = 0
        self._prompts.pop(slot, None)

    def of(self, batch: Batch, positions: Ints) -> Ints | None:
        """The positions of a flat batch for the rotary embedding: int64[3, T] if it has tokens up to the last
        picture of a prompt, else int64[T]; None: they are ``positions`` int64[T], those in the histories."""
        if not self._prompts:
            return None
        delta = self._delta[batch.slots]
        seeing = np.flatnonzero(batch.start < self._ends[batch.slots])
        if not len(seeing) and not np.count_nonzero(delta):
            return None
        rope: Ints = positions + np.repeat(delta, batch.count)
        if len(seeing):
            rope = np.repeat(rope[None], 3, 0)
        for part in seeing.tolist():
            start, first = int(batch.start[part]), int(batch.count[:part].sum())
            known = self._prompts[int(batch.slots[part])][:, start : start + int(batch.count[part])]
            rope[:, first : first + known.shape[1]] = known
        return rope
