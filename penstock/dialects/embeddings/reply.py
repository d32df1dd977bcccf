"""Bodies of replies with vectors, as OpenAI and vLLM have them."""

from __future__ import annotations

import time
from binascii import b2a_base64
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from penstock.generation.pooling.dialect import PoolingBody
from penstock.generation.pooling.plan import PooledInputs, PoolingPlan
from penstock.generation.pooling.request_fields import VectorsRequest
from penstock.http.errors import encode_json, refused
from penstock.http.sink import Headers

FORMATS = ("float", "base64")


class Encoding(NamedTuple):
    """How a reply has the vectors."""

    format: str
    """One of FORMATS."""

    @classmethod
    def of_request(cls, request: VectorsRequest, accept: Headers) -> Encoding:
        """``accept``: the request's headers. Raises ApiError."""
        format = _one_of(FORMATS, request.encoding_format, "encoding_format")
        return cls(
            format,
        )


def vectors_body(
    plan: PoolingPlan, pooled: PooledInputs, id: str, *, kind: bytes, field: bytes
) -> PoolingBody:
    """A list of the vectors. ``kind``: ``object`` of its items, which have their vectors as ``field``. Raises
    ApiError."""
    middle = b',"object":"%b","%b":' % (kind, field)
    items = (
        b'%b{"index":%d%b%b}' % (b"," if index else b"", index, middle, spelled)
        for index, spelled in enumerate(_spelled(plan.fields, pooled))
    )
    return PoolingBody(chain((list_start(plan, id),), items, (list_end(pooled),)))


def _spelled(encoding: Encoding, pooled: PooledInputs) -> Iterator[bytes]:
    for index in range(len(pooled)):
        values = pooled.of_input(index)
        if encoding.format == "float":
            yield encode_json(values.tolist())
        else:
            yield b'"%b"' % b2a_base64(values.tobytes(), newline=False)


def list_start(plan: PoolingPlan, id: str) -> bytes:
    """A list's JSON up to its first item."""
    fields = {"id": id, "object": "list", "created": int(time.time()), "model": plan.model}
    return encode_json(fields)[:-1] + b',"data":['


def list_end(pooled: PooledInputs) -> bytes:
    """A list's JSON from the end of its last item."""
    tokens = pooled.usage.prompt_tokens
    return b'],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":0}}' % (tokens, tokens)


def _one_of(allowed: tuple[str, ...], given: str | None, field: str) -> str:
    """What is given, by default the first that is allowed. Raises ApiError."""
    if given is None:
        return allowed[0]
    if given not in allowed:
        raise refused(f"{field} must be {', '.join(allowed)}.", field, given)
    return given
