"""Logprobs by token id, as ``/inference/v1/generate`` has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np

from penstock.generation.replies.logprobs import TokenLogprobs


def entries_by_id(logprobs: TokenLogprobs, *, ranked: bool = True) -> Iterator[bytes]:
    """A JSON list with an object per token, in pieces. Its ``top_logprobs`` are the token itself, then the
    alternatives in order. A rank is the place among the alternatives, if these are ``ranked``; a token that
    is none of them has none."""
    separator = b"["
    if logprobs.wide:
        for row in range(len(logprobs.ids)):
            yield separator
            yield from _wide_entry(logprobs, row, ranked=ranked)
            separator = b","
    else:
        for rows in logprobs.pieces():
            yield separator + b",".join([_entry(ids, values, ranked=ranked) for ids, values in rows])
            separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _entry(ids: list[int], values: list[bytes], *, ranked: bool) -> bytes:
    own, others = ids[0], ids[1:]
    fields = _fields(own, values[0], others.index(own) + 1 if ranked and own in others else 0)
    ranks = range(1, len(ids)) if ranked else repeat(0)
    return _whole(own, fields, [fields, *_alternatives(own, zip(others, values[1:], ranks, strict=False))])


def _whole(token: int, fields: bytes, tops: list[bytes]) -> bytes:
    """``token`` is there in the spelling of vLLM 0.30 as well, which clients check."""
    return b'{"token":"token_id:%d",%b,"top_logprobs":[{%b}]}' % (token, fields, b"},{".join(tops))


def _fields(token: int, value: bytes, rank: int) -> bytes:
    return b'"token_id":%d,"logprob":%b,"rank":%b' % (token, value, b"%d" % rank if rank else b"null")


def _alternatives(own: int, ranked: Iterable[tuple[int, bytes, int]]) -> Iterator[bytes]:
    for token, value, rank in ranked:
        if token >= 0 and token != own:
            yield _fields(token, value, rank)


def _wide_entry(logprobs: TokenLogprobs, row: int, *, ranked: bool) -> Iterator[bytes]:
    """The object of one token with very many candidates, in pieces."""
    candidates = logprobs.ids[row]
    own = int(candidates[0])
    places = np.flatnonzero(candidates[1:] == own)
    start = 0
    for ids, values in logprobs.slices(row):
        ranks = range(start, start + len(ids)) if ranked else repeat(0)
        tops = list(_alternatives(own, zip(ids, values, ranks, strict=False)))
        if not start:
            fields = _fields(own, values[0], int(places[0]) + 1 if ranked and len(places) else 0)
            yield _whole(own, fields, [fields, *tops])[:-2]
        elif tops:
            yield b",{%b}" % b"},{".join(tops)
        start += len(ids)
    yield b"]}"
