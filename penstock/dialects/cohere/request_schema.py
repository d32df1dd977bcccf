"""The request body of Cohere's ``/v1/embed`` and ``/v2/embed``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.generation.pooling.request_fields import UNSUPPORTED_POOLING, PoolingRequest
from penstock.generation.request.schemas import about
from penstock.generation.request.unsupported import UnsupportedField, absent, other_names

EMBEDDING_TYPES = ("float", "int8", "uint8", "binary", "ubinary", "base64")
TRUNCATE = ("NONE", "START", "END")

_NO_MEDIA = "the model reads text alone, so it must be absent"
_NOT_EMPTY = {"minItems": 1}


class CohereContent(msgspec.Struct, gc=False):
    """A part of an input."""

    type: Annotated[str, about("text; images are refused.")]
    text: str | None = None
    image_url: Any = None


class CohereInput(msgspec.Struct, gc=False):
    """An input of parts."""

    content: list[CohereContent]


class CohereEmbedRequest(PoolingRequest, kw_only=True):
    """Body of POST /v1/embed and /v2/embed. Besides, it may have vLLM's fields."""

    texts: Annotated[list[str] | None, about("The inputs.", extra_json_schema=_NOT_EMPTY)] = None
    inputs: Annotated[
        list[CohereInput] | None,
        about("In place of texts: inputs of parts.", extra_json_schema=_NOT_EMPTY),
    ] = None
    input_type: Annotated[
        str | None,
        about(
            "What vectors are for: search_query, search_document, classification, clustering, or the name of "
            "a prompt of the model. It decides on the prompt before each input."
        ),
    ] = None
    embedding_types: Annotated[
        list[Annotated[str, msgspec.Meta(extra_json_schema={"enum": [*EMBEDDING_TYPES]})]] | None,
        about("Forms of the vectors; default: float."),
    ] = None
    output_dimension: Annotated[int | None, about("Values of a vector, the first ones; default: all.")] = None
    truncate: Annotated[
        str | None,
        about(
            "Where longer inputs are cut; NONE: they are an error; default END.",
            extra_json_schema={"enum": [*TRUNCATE, None]},
        ),
    ] = None
    max_tokens: Annotated[int | None, about("Maximum tokens of an input; default: the model's.")] = None
    images: Any = None
    dimensions: Any = None


UNSUPPORTED = (
    *UNSUPPORTED_POOLING,
    UnsupportedField("images", absent, _NO_MEDIA),
    *other_names("output_dimension", "dimensions"),
)
