"""What has been made of a request's inputs, as bytes: JSON numbers, base64, or the matrix itself.

JSON has for each float32 the fewest digits that read back as the same float32 (orjson prints them). What is
made of many values comes in parts that take less than a millisecond each; no value becomes an object.
"""

from __future__ import annotations

import binascii
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.generation.pooling.dialect import PoolingBody
from penstock.generation.pooling.plan import PooledInputs
from penstock.generation.replies.safetensors_writer import (
    PIECE_BYTES,
    SAFETENSORS,
    safetensors_file,
    tensor_of,
)
from penstock.http.accept import asks_for
from penstock.http.errors import ApiError, encode_json
from penstock.http.request import JSON
from penstock.http.sink import Headers
from penstock.wire.arrays import F32

OCTETS = b"application/octet-stream"

MAX_PART_VALUES = 24 * 1024
"""Values that are converted and spelled at a time: 0.4 ms as JSON, 0.1 ms as base64. A multiple of 3, so that
base64 has padding only at its end, and of 8, so that bits fill bytes."""
JSON_PIECE_BYTES = 128 * 1024
"""Bytes of a piece of JSON: 0.2 ms of a core that does nothing else."""
MAX_PIECE_PARTS = 256
"""Parts that are joined to a piece: 0.4 ms if each is of an input with few values."""
MAX_LISTED_INPUTS = 64
"""Inputs that a header lists, 100 bytes each: clients take heads of 8 to 64 KB."""

Numbers: TypeAlias = NDArray[Any]
Opening: TypeAlias = Callable[[int], bytes]
_Convert: TypeAlias = Callable[[F32], Numbers]
_Spell: TypeAlias = Callable[[F32, bool], Iterator[bytes]]
"""An input's rows, float32[rows, W], and whether they are its tokens', to parts."""


def json_pieces(*parts: bytes | Iterable[bytes]) -> Iterator[bytes]:
    """The body that the parts are together, some of which come one after the other, in pieces to send."""
    waiting: list[bytes] = []
    size = 0
    for part in chain.from_iterable((each,) if isinstance(each, bytes) else each for each in parts):
        waiting.append(part)
        size += len(part)
        if size >= JSON_PIECE_BYTES or len(waiting) >= MAX_PIECE_PARTS:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def joined(items: Iterable[bytes]) -> Iterator[bytes]:
    """The items of a JSON array with commas between them, as parts for :func:`json_pieces`."""
    separator = b""
    for item in items:
        yield separator + item
        separator = b","


# -- the items of a JSON array, one per input, with the commas between them, as parts for json_pieces()


def float_items(pooled: PooledInputs, before: Opening | None = None, after: bytes = b"") -> Iterator[bytes]:
    """The vector of each input as an array of numbers, with a task per token an array of such arrays.

    ``before(index)`` and ``after`` are JSON around it, such as ``{"index":0,"embedding":`` and ``}``. Raises
    ApiError at once for values that JSON does not have.
    """
    require_finite(pooled.values)
    return _items(pooled, partial(_arrays, _same), before, after)


def integer_items(
    pooled: PooledInputs, kind: str, before: Opening | None = None, after: bytes = b""
) -> Iterator[bytes]:
    """As :func:`float_items`, with integers. ``kind``: one of :data:`INTEGERS`."""
    require_finite(pooled.values)
    convert = partial(INTEGERS[kind], width=pooled.values.shape[1])
    return _items(pooled, partial(_arrays, convert), before, after)


def base64_items(
    pooled: PooledInputs,
    before: Opening | None = None,
    after: bytes = b"",
    *,
    dtype: str = "float32",
    big_endian: bool = False,
) -> Iterator[bytes]:
    """Each input's values, row after row, as a string of base64. ``dtype``: one of :data:`DTYPES`."""
    return _items(pooled, partial(_base64, _as_bytes_of(dtype, big_endian)), before, after)


def number_texts(values: F32) -> list[bytes]:
    """JSON of each number, at least one: scores. Raises ApiError for values that JSON does not have."""
    require_finite(values)
    return _json(np.ascontiguousarray(values, np.float32).ravel())[1:-1].split(b",")


def require_finite(values: F32) -> None:
    """Raises ApiError if values are infinite or no numbers (0.13 ms per million)."""
    finite = np.isfinite(values)
    if not finite.all():
        raise ApiError(
            500,
            f"The engine returned {values.size - np.count_nonzero(finite)} of {values.size} values that are "
            "infinite or not a number, which JSON cannot express.",
            code="engine_error",
        )


def _items(pooled: PooledInputs, spell: _Spell, before: Opening | None, after: bytes) -> Iterator[bytes]:
    values, per_token = np.ascontiguousarray(pooled.values, np.float32), pooled.per_token
    rows = pooled.lengths.tolist() if per_token else [1] * len(pooled)
    start, separator = 0, b""
    for index, count in enumerate(rows):
        opening = separator if before is None else separator + before(index)
        if opening:
            yield opening
        yield from spell(values[start : start + count], per_token)
        if after:
            yield after
        start, separator = start + count, b","


def _arrays(convert: _Convert, rows: F32, nested: bool) -> Iterator[bytes]:
    width = rows.shape[1]
    step = max(1, MAX_PART_VALUES // max(1, width))
    if nested:
        yield b"["
    for start in range(0, len(rows), step):
        if start:
            yield b","
        if width <= MAX_PART_VALUES:
            yield _json(convert(rows[start : start + step]))[1:-1]
        else:
            yield from _wide_array(convert, rows[start])
    if nested:
        yield b"]"


def _wide_array(convert: _Convert, row: F32) -> Iterator[bytes]:
    opening = b"["
    for start in range(0, len(row), MAX_PART_VALUES):
        yield opening + _json(convert(row[start : start + MAX_PART_VALUES]))[1:-1]
        opening = b","
    yield b"]"


def _base64(convert: _Convert, rows: F32, nested: bool) -> Iterator[bytes]:
    values = rows.reshape(-1)
    if len(values) <= MAX_PART_VALUES:
        yield b'"%b"' % binascii.b2a_base64(convert(values).data, newline=False)
        return
    yield b'"'
    for start in range(0, len(values), MAX_PART_VALUES):
        yield binascii.b2a_base64(convert(values[start : start + MAX_PART_VALUES]).data, newline=False)
    yield b'"'


def _json(values: Numbers) -> bytes:
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)


# -- the matrix itself


def asked_for(accept: Headers) -> bytes:
    """The content type in which a request with these headers wants its vectors: OCTETS, SAFETENSORS or
    JSON."""
    named = b",".join([value for name, value in accept if name == b"accept"]).lower()
    kinds = (kind for kind in (OCTETS, SAFETENSORS) if kind in named and asks_for(accept, kind, JSON))
    return next(kinds, JSON)


def check_listed(inputs: int) -> None:
    """Raises ApiError if an octet stream with a vector per token cannot say which rows are whose."""
    if inputs > MAX_LISTED_INPUTS:
        raise ApiError(
            400,
            f"{OCTETS.decode()} with a vector per token is for at most {MAX_LISTED_INPUTS} inputs, not "
            f"{inputs}: ask for {SAFETENSORS.decode()}.",
            param="accept",
        )


def octet_stream(
    pooled: PooledInputs, model: str, request_id: str, *, dtype: str = "float32", big_endian: bool = False
) -> PoolingBody:
    """The matrix, row after row. The header ``metadata`` is JSON: vLLM's fields with its list of inputs, if
    these are at most MAX_LISTED_INPUTS, and the matrix's ``shape`` and numbers. Raises ApiError if it does
    not say which rows are whose."""
    listed = len(pooled) <= MAX_LISTED_INPUTS
    if pooled.per_token:
        check_listed(len(pooled))
    values, convert = np.ascontiguousarray(pooled.values, np.float32), _as_bytes_of(dtype, big_endian)
    flat, step = values.reshape(-1), PIECE_BYTES // 4
    form = {"embed_dtype": dtype, "endianness": "big" if big_endian else "little"}
    row = values.shape[1] * convert(flat[:1]).itemsize
    metadata = {
        "id": request_id,
        "created": int(time.time()),
        "model": model,
        **form,
        "shape": values.shape,
        "data": _places(pooled, row, form) if listed else None,
        "usage": _usage(pooled),
    }
    pieces = (convert(flat[at : at + step]).tobytes() for at in range(0, len(flat), step))
    return PoolingBody(pieces, OCTETS, len(values) * row, ((b"metadata", _ascii(metadata)),))


def _places(pooled: PooledInputs, row: int, form: Mapping[str, str]) -> list[dict[str, Any]]:
    """Where the values of each input are, as vLLM says it. ``row``: bytes of a row."""
    width, start, places = pooled.values.shape[1], 0, []
    for index, tokens in enumerate(pooled.lengths.tolist()):
        shape = (tokens, width) if pooled.per_token else (width,)
        end = start + (tokens if pooled.per_token else 1) * row
        places.append({"index": index, **form, "start": start, "end": end, "shape": shape})
        start = end
    return places


def safetensors_body(pooled: PooledInputs, model: str, request_id: str) -> PoolingBody:
    """A safetensors file: ``embeddings``, float32[rows, W], and with a vector per token ``lengths``,
    int32[inputs]. The metadata ``id``, ``model`` and ``usage`` are JSON."""
    fields = {"id": request_id, "model": model, "usage": _usage(pooled)}
    tensors = [tensor_of("embeddings", [np.ascontiguousarray(pooled.values, np.float32)])]
    if pooled.per_token:
        tensors.append(tensor_of("lengths", [pooled.lengths]))
    metadata = {name: encode_json(value).decode() for name, value in fields.items()}
    file = safetensors_file(tensors, metadata)
    return PoolingBody(file.pieces(), SAFETENSORS, file.size)


def _usage(pooled: PooledInputs) -> dict[str, int]:
    tokens = pooled.usage.prompt_tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _ascii(fields: Mapping[str, Any]) -> bytes:
    """JSON for a header."""
    return json.dumps(fields).encode()


# -- numbers of fewer bits


def _same(values: F32) -> Numbers:
    return values


def _float16(values: F32) -> Numbers:
    with np.errstate(over="ignore"):
        return values.astype("<f2")


def _bfloat16(values: F32) -> Numbers:
    """The upper halves of the bits, rounded to the nearest, of two such to the even one."""
    bits = values.view("<u4")
    rounded: Numbers = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    rounded[np.isnan(values)] = 0x7FC0
    return rounded


DTYPES: Final[dict[str, _Convert]] = {"float32": _same, "float16": _float16, "bfloat16": _bfloat16}
"""Numbers of base64 and of binary replies."""


def _as_bytes_of(dtype: str, big_endian: bool) -> _Convert:
    convert = DTYPES[dtype]
    return (lambda values: convert(values).byteswap()) if big_endian else convert


RANGE = 8.0
"""Values of a vector of length 1 are within ± RANGE / sqrt(W) but for outliers, whose integers are the least
or the greatest."""


def _levels(values: F32, width: int) -> F32:
    """0 to 255, as sentence-transformers has them for such a range."""
    edge = np.float32(min(1.0, RANGE / width**0.5))
    levels: F32 = np.clip((values + edge) / (2 * edge / np.float32(255)), 0, 255)
    return levels


def _uint8(values: F32, width: int) -> Numbers:
    return _levels(values, width).astype(np.uint8)


def _int8(values: F32, width: int) -> Numbers:
    return (_levels(values, width) - 128).astype(np.int8)


def _ubinary(values: F32, width: int) -> Numbers:
    return np.packbits(values > 0, axis=-1)


def _binary(values: F32, width: int) -> Numbers:
    return (_ubinary(values, width) ^ 0x80).view(np.int8)


INTEGERS: Final[dict[str, Callable[..., Numbers]]] = {
    "int8": _int8,
    "uint8": _uint8,
    "binary": _binary,
    "ubinary": _ubinary,
}
"""Cohere's types of embeddings. ``uint8``: the 256 steps of the range; ``int8``: -128 to 127, cut toward 0;
``ubinary``: a bit per value, 1 if it is above 0, eight to a number, the first one the highest; ``binary``:
the same less 128."""
