"""Bodies of replies with vectors, as OpenAI and vLLM have them."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from penstock.generation.pooling.dialect import PoolingBody
from penstock.generation.pooling.plan import PooledInputs, PoolingPlan
from penstock.generation.pooling.request_fields import VectorsRequest
from penstock.generation.pooling.vector_text import (
    DTYPES,
    OCTETS,
    asked_for,
    base64_items,
    float_items,
    json_pieces,
    octet_stream,
    safetensors_body,
)
from penstock.http.errors import encode_json, refused
from penstock.http.request import JSON
from penstock.http.sink import Headers

FORMATS = ("float", "base64", "bytes", "bytes_only")
BYTE_ORDERS = ("native", "little", "big")


class Encoding(NamedTuple):
    """How a reply has the vectors."""

    format: str
    """One of FORMATS."""
    kind: bytes
    """The reply's content type."""
    dtype: str
    """Of the values, but of float."""
    big_endian: bool

    @classmethod
    def of_request(cls, request: VectorsRequest, accept: Headers) -> Encoding:
        """``accept``: the request's headers. Raises ApiError."""
        if request.use_activation is None:
            request.use_activation = request.normalize
        format = _one_of(FORMATS, request.encoding_format, "encoding_format")
        return cls(
            format,
            OCTETS if format.startswith("bytes") else asked_for(accept),
            _one_of(tuple(DTYPES), request.embed_dtype, "embed_dtype"),
            _one_of(BYTE_ORDERS, request.endianness, "endianness") == "big",
        )


def vectors_body(
    plan: PoolingPlan, pooled: PooledInputs, id: str, *, kind: bytes, field: bytes
) -> PoolingBody:
    """A list of the vectors. ``kind``: ``object`` of its items, which have their vectors as ``field``. Raises
    ApiError."""
    encoding: Encoding = plan.fields
    form: dict[str, Any] = {"dtype": encoding.dtype, "big_endian": encoding.big_endian}
    if encoding.kind == OCTETS:
        made = octet_stream(pooled, plan.model, id, **form)
        return made._replace(headers=()) if encoding.format == "bytes_only" else made
    if encoding.kind != JSON:
        return safetensors_body(pooled, plan.model, id)
    middle = b',"object":"%b","%b":' % (kind, field)

    def before(index: int) -> bytes:
        return b'{"index":%d%b' % (index, middle)

    if encoding.format == "float":
        items = float_items(pooled, before, b"}")
    else:
        items = base64_items(pooled, before, b"}", **form)
    return PoolingBody(json_pieces(list_start(plan, id), items, list_end(pooled)))


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
