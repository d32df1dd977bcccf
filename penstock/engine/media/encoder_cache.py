"""The features of pictures, by key: kept for other prompts with the same picture."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from penstock.wire.media.items import MediaKey


@dataclass(slots=True)
class _Entry:
    features: int
    value: Any = None
    """None: the step that has made room for it has not been launched."""
    used: int = 0
    """The last step that used it."""
    holders: int = 0
    """Streams whose latest chunk ended within the picture: the next one needs it, too."""


class EncoderCache:
    """Up to ``budget`` features. The least recently used pictures make way, except those of the step that is
    being scheduled, and those in the middle of which a stream is: each of these can go on."""

    def __init__(self, budget: int) -> None:
        """``budget``: features (``--encoder-cache-tokens``)."""
        self.budget = budget
        self.used = 0
        """Features that are kept, or for which there is room."""
        self._entries: OrderedDict[MediaKey, _Entry] = OrderedDict()
        """The least recently used ones first."""
        self._held: dict[int, MediaKey] = {}
        """By slot, the picture that it holds."""
        self._step = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: MediaKey) -> bool:
        """Whether the features are there, or will be with this step."""
        entry = self._entries.get(key)
        return entry is not None and (entry.value is not None or entry.used == self._step)

    def begin_step(self) -> None:
        """The step before has been launched, or has failed."""
        self._step += 1

    def use(self, key: MediaKey) -> bool:
        """Keep a picture for this step. False: the cache does not have it."""
        if key not in self:
            return False
        self._entries[key].used = self._step
        self._entries.move_to_end(key)
        return True

    def make_room(self, key: MediaKey, features: int) -> bool:
        """Make room for a picture that the cache does not have, for this step. False: what others need leaves
        none."""
        if (known := self._entries.get(key)) is not None:  # its step has failed
            known.used = self._step
            return True
        missing = self.used + features - self.budget
        victims = []
        for other, entry in self._entries.items() if missing > 0 else ():
            if not entry.holders and entry.used != self._step:
                victims.append(other)
                missing -= entry.features
                if missing <= 0:
                    break
        if missing > 0:
            return False
        for other in victims:
            self.used -= self._entries.pop(other).features
        self._entries[key] = _Entry(features, used=self._step)
        self.used += features
        return True

    def get(self, key: MediaKey) -> Any:
        """The features; None: there are none yet."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def put(self, key: MediaKey, value: Any) -> None:
        """The features of a picture, which are kept if there is room for it."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.value = value

    # -- streams

    def hold(self, slot: int, key: MediaKey | None) -> None:
        """The slot's next chunk goes on within this picture, which the cache has; None: within none."""
        if key is not None or slot in self._held:
            before = self._held.pop(slot, None)
            if before is not None and before in self._entries:
                self._entries[before].holders -= 1
            if key is not None:
                self._entries[key].holders += 1
                self._held[slot] = key

    def clear(self) -> None:
        """Forget all features: they are of other weights, or their memory is wanted."""
        self._entries.clear()
        self._held.clear()
        self.used = 0
