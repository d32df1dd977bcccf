"""Logprobs by token id, as ``/inference/v1/generate`` has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from penstock.generation.replies.logprobs import TokenLogprobs


def entries_by_id(logprobs: TokenLogprobs) -> Iterator[bytes]:
    """A JSON list with an object per token, in pieces. Its ``top_logprobs`` are the token itself, then the
    alternatives in order. A rank is the place among the alternatives; a token that is none of them has
    none."""
    separator = b"["
    if logprobs.wide:
        for row in range(len(logprobs.ids)):
            yield separator
            yield from _wide_entry(logprobs, row)
            separator = b","
    else:
        for rows in logprobs.pieces():
            yield separator + b",".join([_entry(ids, values) for ids, values in rows])
            separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _entry(ids: list[int], values: list[bytes]) -> bytes:
    own, others = ids[0], ids[1:]
    fields = _fields(own, values[0], others.index(own) + 1 if own in others else 0)
    ranked = zip(others, values[1:], range(1, len(ids)), strict=True)
    return _whole(fields, [fields, *_alternatives(own, ranked)])


def _whole(fields: bytes, tops: list[bytes]) -> bytes:
    return b'{%b,"top_logprobs":[{%b}]}' % (fields, b"},{".join(tops))


def _fields(token: int, value: bytes, rank: int) -> bytes:
    return b'"token_id":%d,"logprob":%b,"rank":%b' % (token, value, b"%d" % rank if rank else b"null")


def _alternatives(own: int, ranked: Iterable[tuple[int, bytes, int]]) -> Iterator[bytes]:
    for token, value, rank in ranked:
        if token >= 0 and token != own:
            yield _fields(token, value, rank)


def _wide_entry(logprobs: TokenLogprobs, row: int) -> Iterator[bytes]:
    """The object of one token with very many candidates, in pieces."""
    candidates = logprobs.ids[row]
    own = int(candidates[0])
    places = np.flatnonzero(candidates[1:] == own)
    start = 0
    for ids, values in logprobs.slices(row):
        ranked = zip(ids, values, range(start, start + len(ids)), strict=True)
        tops = list(_alternatives(own, ranked))
        if not start:
            fields = _fields(own, values[0], int(places[0]) + 1 if len(places) else 0)
            yield _whole(fields, [fields, *tops])[:-2]
        elif tops:
            yield b",{%b}" % b"},{".join(tops)
        start += len(ids)
    yield b"]}"
