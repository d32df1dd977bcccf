"""Encodes prompts, and only what is new in those of a conversation.

Chat templates begin every message with an added token, such as ``<|im_start|>``. Tokenizers encode the text
between added tokens apart, so the ids of a prompt are those of its segments, one after the other. Segments
are cached: the next turn of a conversation encodes its new messages. Whether a tokenizer encodes so is
checked when it is loaded (:func:`segment_marker`); otherwise prompts are encoded as a whole.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from itertools import pairwise
from threading import Lock
from typing import Any, TypeAlias

from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.tokenizer import Tokenizer, check_texts
from penstock.generation.prompt.turn_memory import NextTurn
from penstock.http.errors import ApiError

SEGMENTED_ABOVE = 4096
"""Characters of a prompt above which it is encoded by segments; to look up shorter ones takes as long."""
MAX_CACHED_BYTES = 128 << 20
"""Memory of the cached segments of an API server: 150 conversations of 100,000 tokens."""
ENTRY_BYTES = 300
"""Memory of a cached segment beside its text and ids."""

Segment: TypeAlias = tuple[str | None, bool, str]
"""Cache salt, whether it follows the marker (or begins the prompt), and text without the marker."""


class PromptEncoder:
    """A tokenizer with a cache of segments, which the threads of an API server share.

    Segments with different cache salts are different: as in the engines' prefix caches, nobody can tell from
    the time of a request what clients with another salt have sent.
    """

    def __init__(
        self, tokenizer: Tokenizer, marker: str | None, max_cached_bytes: int = MAX_CACHED_BYTES
    ) -> None:
        """``marker``: of :func:`segment_marker`; None: prompts are encoded as a whole."""
        self.tokenizer = tokenizer
        self.cached_bytes = 0
        self._marker = marker
        self._max_cached_bytes = max_cached_bytes
        self._lock = Lock()
        self._cached: OrderedDict[Segment, tuple[bytes, int]] = OrderedDict()
        """Ids and memory of each segment, the longest unused first."""

    def encode(
        self, text: str, add_special_tokens: bool, cache_salt: str | None, turn: NextTurn | None = None
    ) -> tuple[bytes, int]:
        """Token ids as little-endian int32 bytes (as in ``Submit.prompt``), and their count. ``turn``: a
        conversation's; what its prompt has in common with that of the turn before is not looked at again."""
        marker = self._marker
        if marker is None or add_special_tokens or len(text) <= SEGMENTED_ABOVE:
            return self.tokenizer.encode_bytes(text, add_special_tokens)
        if turn is None:
            parts = self._encode_segments(text, marker, cache_salt)
            known: bytes | memoryview = b""
        else:
            cut, known = turn.known_prompt(text)
            parts = self._encode_segments(text[cut:], marker, cache_salt)
        ids = b"".join((known, *parts))
        if turn is not None:
            turn.learn_prompt(text, max(0, text.rfind(marker)), ids, len(ids) - len(parts[-1]))
        return ids, len(ids) >> 2

    def unknown_characters(self, text: str, add_special_tokens: bool, turn: NextTurn) -> int:
        """How many characters :meth:`encode` looks at."""
        if self._marker is None or add_special_tokens:
            return len(text)
        return len(text) - turn.known_prompt(text)[0]

    def _encode_segments(self, text: str, marker: str, cache_salt: str | None) -> list[bytes]:
        """The ids of the text before the first marker, and of each text that begins with one."""
        follows = False
        segments: list[Segment] = []
        for part in text.split(marker):
            segments.append((cache_salt, follows, part))
            follows = True
        found = self._look_up(segments)
        if None in found:
            fresh = {segment: b"" for segment, ids in zip(segments, found, strict=True) if ids is None}
            for segment in fresh:
                before = marker if segment[1] else ""
                fresh[segment] = self.tokenizer.encode_bytes(before + segment[2], False)[0]
            self._keep(fresh)
            found = [fresh[each] if ids is None else ids for each, ids in zip(segments, found, strict=True)]
        return found  # type: ignore[return-value] # none is None any more

    def _look_up(self, segments: list[Segment]) -> list[bytes | None]:
        cached = self._cached
        parts: list[bytes | None] = []
        with self._lock:
            for segment in segments:
                entry = cached.get(segment)
                if entry is None:
                    parts.append(None)
                else:
                    cached.move_to_end(segment)
                    parts.append(entry[0])
        return parts

    def _keep(self, fresh: dict[Segment, bytes]) -> None:
        cached = self._cached
        with self._lock:
            for segment, ids in fresh.items():
                size = ENTRY_BYTES + sys.getsizeof(segment[2]) + sys.getsizeof(ids)
                if segment not in cached and size <= self._max_cached_bytes:
                    cached[segment] = ids, size
                    self.cached_bytes += size
            while self.cached_bytes > self._max_cached_bytes:
                self.cached_bytes -= cached.popitem(last=False)[1][1]


# -- the marker

_PROBE: tuple[tuple[str, str], ...] = (("user", "first"), ("assistant", "second"), ("user", "third"))
"""Roles and texts that every chat template accepts."""


def segment_marker(tokenizer: Tokenizer, template: ChatTemplate | None) -> str | None:
    """The added token before which prompts of ``template`` may be cut: the ids of both parts, joined, are
    those of the whole. The one that is most frequent in a conversation, and of these the first. None if there
    is none, or none that was found to be exact."""
    if template is None:
        return None
    text = _probe(template)
    counts = {token: text.count(token) for token in _boundaries(tokenizer)}
    repeated = [token for token, count in counts.items() if count > 1]
    repeated.sort(key=lambda token: (-counts[token], text.index(token)))
    return next((token for token in repeated if _is_exact(tokenizer, token)), None)


def _probe(template: ChatTemplate) -> str:
    """A conversation as the template renders it; empty if it cannot."""
    for as_parts in (False, True):
        messages: list[dict[str, Any]] = [
            {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
            for role, text in _PROBE
        ]
        with contextlib.suppress(ApiError):
            prompt = template.render(messages)
            if all(text in prompt for _, text in _PROBE):
                return prompt
    return ""


def _boundaries(tokenizer: Tokenizer) -> list[str]:
    """The added tokens that are found wherever they occur in a text, and that begin where they occur.

    Not so: tokens that take spaces before them, that must be whole words, or that are found in normalized
    text; and those that another added token, found before, may cover.
    """
    added = list(tokenizer.raw.get_added_tokens_decoder().values())
    contents = [token.content for token in added]
    return [
        token.content
        for token in added
        if not (token.lstrip or token.single_word or token.normalized)
        and token.content[:1].strip()
        and not any(_may_cover(other, token.content) for other in contents)
    ]


def _may_cover(other: str, token: str) -> bool:
    """Whether an occurrence of ``other`` may begin before one of ``token`` and reach into it."""
    ends = (other[start:] for start in range(1, len(other)))
    return any(end.startswith(token) or token.startswith(end) for end in ends)


def _is_exact(tokenizer: Tokenizer, token: str) -> bool:
    """Whether texts of all kinds have the ids of their parts when they are cut before ``token``."""

    def ids(text: str) -> bytes:
        return tokenizer.encode_bytes(text, False)[0]

    return all(
        ids(before + token + after) == ids(before) + ids(token + after)
        for before, after in pairwise(check_texts(tokenizer.raw))
    )
