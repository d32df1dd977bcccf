"""The request bodies of TEI's API (Hugging Face's text-embeddings-inference)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.generation.pooling.request_fields import PoolingRequest
from penstock.generation.request.schemas import PromptToken, about

_NOT_EMPTY = {"minItems": 1}


class TeiOptions(PoolingRequest, kw_only=True):
    """What requests have in common. Besides, they may have vLLM's fields."""

    truncate: Annotated[bool | None, about("Cut what is longer than the model takes; default true.")] = None
    truncation_direction: Annotated[
        str | None, about("Side on which tokens are dropped: right (default) or left.")
    ] = None


class TeiTextsRequest(TeiOptions, kw_only=True):
    """Body of POST /embed_all and /embed_sparse."""

    inputs: Annotated[
        str | list[str | PromptToken | list[PromptToken]] | None,
        about(
            "A text, a list of texts, a list of token ids, or a list of lists of token ids.",
            extra_json_schema=_NOT_EMPTY,
        ),
    ] = None
    prompt_name: Annotated[
        str | None, about("Name of the prompt, of those in the model's files, that precedes each input.")
    ] = None


class TeiEmbedRequest(TeiTextsRequest, kw_only=True):
    """Body of POST /embed."""

    normalize: Annotated[bool | None, about("Whether vectors have the length 1; default true.")] = None
    dimensions: Annotated[int | None, about("Values of a vector, the first ones; default: all.")] = None


class TeiPredictRequest(TeiOptions, kw_only=True):
    """Body of POST /predict."""

    inputs: Annotated[
        str | list[str | list[str]] | None,
        about(
            "A text, a pair of texts, or a list of lists of one or two texts.", extra_json_schema=_NOT_EMPTY
        ),
    ] = None
    raw_scores: Annotated[bool | None, about("Numbers as they are, not probabilities.")] = None


class TeiSentences(msgspec.Struct, kw_only=True):
    """What is compared."""

    source_sentence: str
    sentences: Annotated[list[str], about("At least one.", extra_json_schema=_NOT_EMPTY)]


class TeiParameters(TeiOptions, kw_only=True):
    """How sentences become vectors."""

    prompt_name: str | None = None


class TeiSimilarityRequest(msgspec.Struct, kw_only=True):
    """Body of POST /similarity."""

    inputs: Annotated[TeiSentences | None, about("What is compared; needed.")] = None
    parameters: TeiParameters | None = None
