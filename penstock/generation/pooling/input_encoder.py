"""Makes token ids of texts and pairs, cut as Hugging Face's tokenizers cut them: a request for vectors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import tokenizers

from penstock.generation.pooling.plan import EncodedInputs, PoolingPlan
from penstock.generation.prompt.tokenizer import PIECE, Tokenizer
from penstock.http.errors import ApiError

CHARACTERS_PER_INPUT = 32
"""An input costs as much as so many characters, however short it is (measured: 1 to 3 us)."""
MAX_PIECE_INPUTS = 256
"""Texts that are encoded at a time, unless they have PIECE characters before: about a millisecond."""
CHARACTERS_PER_TOKEN, LEAST_PART = 8, 1024
"""Characters of a text that is encoded to be cut: LEAST_PART, and so many per token that it keeps."""
MORE_TOKENS = 64
"""What a part of a text must have more than it keeps: its end may differ from the whole text's there."""


class Layout(NamedTuple):
    """What a tokenizer puts around an input: int32 little-endian ids."""

    before: bytes
    between: bytes
    """The two texts of a pair."""
    after: bytes
    typed: int | None
    """How many of these come before the first token of type 1; None: there is none, or no pair."""

    @property
    def added(self) -> int:
        """How many ids these are."""
        return (len(self.before) + len(self.between) + len(self.after)) // 4


class InputEncoder:
    """Encodes requests' inputs; several threads may at the same time."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, pools_prompt: bool = True) -> None:
        """``max_tokens``: of the longest input, special ones included. ``pools_prompt``: whether the tokens
        of a prompt count in a vector."""
        self._tokenizer = tokenizer
        self._pools_prompt = pools_prompt
        self._max_tokens = max_tokens
        self._layouts: dict[tuple[bool, bool], Layout] = {}

    def cost(self, plan: PoolingPlan) -> int:
        """How many characters take as long to encode as the inputs: up to ``inline_characters[False]`` of the
        tokenizer take about a millisecond, more belong in a thread."""
        texts = sum(
            len(each) if isinstance(each, str) else len(each[0]) + len(each[1])
            for each in plan.inputs
            if not isinstance(each, bytes)
        )
        return texts + (len(plan.prompt) + CHARACTERS_PER_INPUT) * len(plan.inputs)

    def encode(self, plan: PoolingPlan) -> EncodedInputs:
        """The token ids of the inputs, with special tokens if ``plan`` adds them; token ids are taken as they
        are, without prompt and special tokens. Raises ApiError for an input that has too many tokens or none.
        """
        if isinstance(plan.inputs[0], tuple):
            return self._encode_pairs(plan, cast("Sequence[tuple[str, str]]", plan.inputs))
        at = [index for index, each in enumerate(plan.inputs) if isinstance(each, str)]
        layout = self._layout(plan.add_special_tokens, False) if at else None
        found = self._bodies(plan, [plan.prompt + cast(str, plan.inputs[index]) for index in at], at, layout)
        texts = dict(zip(at, found, strict=True))
        parts: list[bytes] = []
        lengths: list[int] = []
        for index, ids in enumerate(plan.inputs):
            if layout is not None and index in texts:
                body = self._cut(plan, index, texts[index], layout.added)
                parts += layout.before, body, layout.after
                lengths.append(len(body) // 4 + layout.added)
            else:
                body = self._cut(plan, index, cast(bytes, ids), 0)
                parts.append(body)
                lengths.append(len(body) // 4)
            if not lengths[-1]:
                raise _without_tokens(plan, index)
        skipped = 0
        if layout is not None and plan.prompt and not self._pools_prompt and len(at) == len(plan.inputs):
            skipped = len(layout.before + self._encode_all([plan.prompt])[0]) // 4
        none = np.zeros(len(lengths), np.int32)
        return EncodedInputs(b"".join(parts), np.array(lengths, np.int32), none, skipped)

    def _encode_pairs(self, plan: PoolingPlan, pairs: Sequence[tuple[str, str]]) -> EncodedInputs:
        layout = self._layout(plan.add_special_tokens, True)
        known: dict[str, int] = {}  # a query has many documents
        for index, (text, _) in enumerate(pairs):
            known.setdefault(text, index)
        found = self._bodies(plan, [plan.prompt + text for text in known], list(known.values()), layout)
        firsts = dict(zip(known, found, strict=True))
        seconds = self._bodies(plan, [second for _, second in pairs], range(len(pairs)), layout)
        parts: list[bytes] = []
        lengths, types = np.zeros(len(pairs), np.int32), np.zeros(len(pairs), np.int32)
        for index, ((text, _), second) in enumerate(zip(pairs, seconds, strict=True)):
            first, second = self._cut_pair(plan, index, firsts[text], second, layout.added)
            parts += layout.before, first, layout.between, second, layout.after
            lengths[index] = (len(first) + len(second)) // 4 + layout.added
            if not lengths[index]:
                raise _without_tokens(plan, index)
            if layout.typed is not None and len(first) // 4 + layout.typed < lengths[index]:
                types[index] = len(first) // 4 + layout.typed
        return EncodedInputs(b"".join(parts), lengths, types)

    # -- cutting

    def _most(self, plan: PoolingPlan) -> int:
        return self._max_tokens if plan.truncate is None else min(plan.truncate, self._max_tokens)

    def _room(self, plan: PoolingPlan, added: int) -> int:
        """Tokens that an input may have beside those added to it."""
        room = self._most(plan) - added
        if room < 0:
            raise ApiError(
                400,
                f"{plan.field}: inputs cannot be truncated to {self._most(plan)} tokens, the tokenizer adds "
                f"{added} special tokens.",
                param=plan.field,
            )
        return room

    def _cut(self, plan: PoolingPlan, index: int, ids: bytes, added: int) -> bytes:
        room = self._room(plan, added)
        if len(ids) <= 4 * room:
            return ids
        if plan.truncate is None:
            raise self._too_long(plan, index, len(ids) // 4 + added)
        return _end_of(ids, room, plan.truncate_left)

    def _cut_pair(
        self, plan: PoolingPlan, index: int, first: bytes, second: bytes, added: int
    ) -> tuple[bytes, bytes]:
        """The longer one is cut first: each keeps half of the tokens, or what the other one does not need."""
        room = self._room(plan, added)
        if len(first) + len(second) <= 4 * room:
            return first, second
        if plan.truncate is None:
            raise self._too_long(plan, index, (len(first) + len(second)) // 4 + added)
        shorter = min(len(first), len(second)) // 4
        shorter = min(shorter, room // 2)
        kept = (shorter, room - shorter) if len(first) <= len(second) else (room - shorter, shorter)
        left = plan.truncate_left
        return _end_of(first, kept[0], left), _end_of(second, kept[1], left)

    def _too_long(self, plan: PoolingPlan, index: int, tokens: int | str) -> ApiError:
        field, name = _field_and_name(plan, index)
        return ApiError(
            400,
            f"This model's maximum context length is {self._max_tokens} tokens. However, "
            f"{name} has {tokens} tokens. Please reduce its length, or ask for truncation.",
            param=field,
            code="context_length_exceeded",
        )

    # -- texts

    def _bodies(
        self, plan: PoolingPlan, texts: Sequence[str], indices: Sequence[int], layout: Layout | None
    ) -> list[bytes]:
        """The ids of each text without special tokens, not yet cut: of a long one that is to be cut, those of
        the part that stays, and some more. ``indices``: the inputs that have the texts, for errors."""
        if layout is None:
            return []
        room = self._room(plan, layout.added)
        if plan.truncate is None:
            for index, text in zip(indices, texts, strict=True):
                if self._tokenizer.is_longer(text, room):
                    raise self._too_long(plan, index, f"more than {self._max_tokens}")
            return self._encode_all(texts)
        left = plan.truncate_left
        size = CHARACTERS_PER_TOKEN * room + LEAST_PART
        parts = [_part(text, size, left) for text in texts]
        found = self._encode_all(parts)
        for at, text in enumerate(texts):
            larger = size
            while len(parts[at]) < len(text) and len(found[at]) < 4 * (room + MORE_TOKENS):
                larger *= 4
                parts[at] = _part(text, larger, left)
                found[at] = self._tokenizer.encode_bytes(parts[at], False)[0]
        return found

    def _encode_all(self, texts: Sequence[str]) -> list[bytes]:
        found: list[bytes] = []
        for piece in _pieces(texts):
            found += self._tokenizer.encode_each(piece, False)
        return found

    def _layout(self, special: bool, pair: bool) -> Layout:
        layout = self._layouts.get((special, pair))
        if layout is None:
            layout = self._layouts[special, pair] = _find_layout(self._tokenizer.raw, special, pair)
        return layout


def _field_and_name(plan: PoolingPlan, index: int) -> tuple[str, str]:
    """The request's field that has an input, and what the input is called there."""
    field, count = plan.before
    if index >= count:
        field, index, count = plan.field, index - count, len(plan.inputs) - count
    return field, f"{field}[{index}]" if count > 1 else field


def _without_tokens(plan: PoolingPlan, index: int) -> ApiError:
    field, name = _field_and_name(plan, index)
    return ApiError(400, f"{name} is empty: it has no token.", param=field)


def _end_of(ids: bytes, tokens: int, left: bool) -> bytes:
    """What stays of ``ids``. ``left``: what is cut."""
    return ids[max(0, len(ids) - 4 * tokens) :] if left else ids[: 4 * tokens]


def _part(text: str, size: int, left: bool) -> str:
    """About ``size`` characters of a text with more than twice as many, cut at a space if there is one."""
    if len(text) <= 2 * size:
        return text
    if left:
        start = text.find(" ", len(text) - size, len(text) - size // 2)
        return text[len(text) - size if start < 0 else start :]
    end = text.rfind(" ", size // 2, size)
    return text[: size if end < 0 else end]


def _pieces(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts, in lists that take a millisecond or two, but for long texts."""
    piece: list[str] = []
    size = 0
    for text in texts:
        if piece and (size + len(text) > PIECE or len(piece) == MAX_PIECE_INPUTS):
            yield piece
            piece, size = [], 0
        piece.append(text)
        size += len(text)
    if piece:
        yield piece


def _find_layout(raw: tokenizers.Tokenizer, special: bool, pair: bool) -> Layout:
    """By an example."""
    words = itertools.chain(("a", "the", "1"), raw.get_vocab())
    word = next((each for each in words if raw.encode(each, add_special_tokens=False).ids), "a")
    encoding = raw.encode(word, word if pair else None, add_special_tokens=special)
    ids, of = np.array(encoding.ids, "<i4"), encoding.sequence_ids
    start, end = of.index(0), len(of) - of[::-1].index(0)
    if not pair:
        return Layout(ids[:start].tobytes(), b"", ids[end:].tobytes(), None)
    second, last = of.index(1), len(of) - of[::-1].index(1)
    types = encoding.type_ids
    typed = types.index(1) - (end - start) if 1 in types else None
    return Layout(ids[:start].tobytes(), ids[end:second].tobytes(), ids[last:].tobytes(), typed)
