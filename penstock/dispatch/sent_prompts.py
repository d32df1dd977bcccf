"""Sends of a long prompt only what an earlier one on the connection does not have.

An API server notes which of the prompts that it has sent the engine keeps
(:mod:`penstock.engine.loop.kept_prompts`), finds the one that another prompt begins with, and compares their
bytes. So what the engine puts together is that prompt, whoever has sent the other one. Which prompts are kept
is decided here; a new connection begins with none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.wire.messages import KeptPrefix, Submit

MIN_BYTES = 1 << 14
"""Shorter prompts, of fewer than 4,096 tokens, are sent whole: that takes less than looking for others."""
_MAX_BYTES = 1 << 28
"""More than a prompt has."""
_PROBE_BYTES = 256


def _probe_ends() -> Iterator[int]:
    end = MIN_BYTES
    while True:
        yield end
        end += end // 32 * 4  # an eighth, in whole tokens


_ENDS = tuple(takewhile(lambda end: end <= _MAX_BYTES, _probe_ends()))
"""Places, in bytes, whose last tokens are looked up: 30 in 160,000 tokens. So a prompt is found that
has at least 8/9 of what the best one has in common."""


class KnownPrefix(NamedTuple):
    """What a prompt is known to begin with, by whoever has made it."""

    prompt: bytes
    """The prompt of an earlier request, the very object."""
    size: int
    """Bytes of it, of whole tokens."""


class _SentPrompt(NamedTuple):
    prompt: bytes
    probes: list[int]


class SentPrompts:
    """What one engine keeps of the prompts sent on one connection, up to ``room`` bytes; the least recently
    used ones are dropped first, as there."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._bytes = 0
        self._number = 0
        """Of the prompt kept last."""
        self._prompts: OrderedDict[int, _SentPrompt] = OrderedDict()
        """By number."""
        self._numbers: dict[int, int] = {}
        """The same numbers by id of the object."""
        self._latest: dict[int, int] = {}
        """Number of the latest prompt with a probe, by hash of the probe."""

    def shorten(self, submit: Submit, known: KnownPrefix | None = None) -> Submit:
        """The Submit as it is to be sent next on the connection. ``known``: of its prompt; None: it is
        compared."""
        prompt = submit.prompt
        if not MIN_BYTES <= len(prompt) <= self._room or submit.resubmitted:
            return submit
        number = 0 if known is None else self._numbers.get(id(known.prompt), 0)
        if known is not None and number:
            size = min(known.size, len(prompt) - 4)
            probes = self._prompts[number].probes[: bisect_right(_ENDS, size)]
            probes += _probes(prompt, len(probes))
        else:
            probes = _probes(prompt)
            number, size = self._find(prompt, probes)
        prefix = None
        if size:
            kept = len(self._prompts[number].prompt)
            # A turn that goes on takes the place of the one before. One that shares less may be of another
            # conversation, and both go on.
            replaced = 8 * size >= 7 * kept
            prefix = KeptPrefix(number, size // 4, replaced)
            if replaced:
                self._drop(number)
            else:
                self._prompts.move_to_end(number)
        self._number += 1
        self._keep(self._number, _SentPrompt(prompt, probes))
        return replace(submit, prompt=prompt[size:], prefix=prefix, keep=self._number)

    def clear(self) -> None:
        """Refer to no prompt sent so far."""
        self._bytes = 0
        self._prompts.clear()
        self._numbers.clear()
        self._latest.clear()

    def _find(self, prompt: bytes, probes: list[int]) -> tuple[int, int]:
        """The number of a kept prompt, and how many bytes of it the prompt begins with, but not all of the
        prompt; (0, 0): there is none."""
        for probe in reversed(probes):
            number = self._latest.get(probe, 0)
            if number and (size := _common(self._prompts[number].prompt, prompt)) >= MIN_BYTES:
                return number, size
        return 0, 0

    def _keep(self, number: int, sent: _SentPrompt) -> None:
        self._prompts[number] = sent
        self._numbers[id(sent.prompt)] = number
        self._bytes += len(sent.prompt)
        for probe in sent.probes:
            self._latest[probe] = number
        while self._bytes > self._room:
            self._drop(next(iter(self._prompts)))

    def _drop(self, number: int) -> None:
        sent = self._prompts.pop(number)
        self._bytes -= len(sent.prompt)
        if self._numbers.get(id(sent.prompt)) == number:
            del self._numbers[id(sent.prompt)]
        for probe in sent.probes:
            if self._latest.get(probe) == number:
                del self._latest[probe]


def _probes(prompt: bytes, first: int = 0) -> list[int]:
    """The probes of a prompt from number ``first`` on."""
    ends = _ENDS[first : bisect_right(_ENDS, len(prompt))]
    return [hash((end, prompt[end - _PROBE_BYTES : end])) for end in ends]


def _common(kept: bytes, prompt: bytes) -> int:
    """Bytes of whole tokens that both begin with, and after which ``prompt`` goes on."""
    most = min(len(kept), len(prompt) - 4)
    if most == len(kept) and prompt.startswith(kept):
        return most
    differs = np.frombuffer(kept, np.int32, most // 4) != np.frombuffer(prompt, np.int32, most // 4)
    first = int(differs.argmax())
    return 4 * first if differs[first] else most
