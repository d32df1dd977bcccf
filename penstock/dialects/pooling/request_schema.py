"""The request bodies of vLLM's ``/pooling``, ``/classify`` and ``/score``, and what in them is refused."""

from __future__ import annotations

from typing import Annotated, Any

from penstock.generation.pooling.request_fields import (
    UNSUPPORTED_POOLING,
    UNSUPPORTED_TEXTS,
    PoolingRequest,
    TextsRequest,
    VectorsRequest,
)
from penstock.generation.request.schemas import JsonObject, about
from penstock.generation.request.unsupported import MUST_BE_ABSENT, UnsupportedField, absent
from penstock.wire.pooling import TASK_NAMES


class PoolingTaskRequest(VectorsRequest, kw_only=True):
    """Body of POST /pooling."""

    task: Annotated[
        str | None,
        about("embed, token_embed, classify or token_classify; default: the first one that the model has."),
    ] = None
    data: Any = None


class ClassifyRequest(TextsRequest, kw_only=True):
    """Body of POST /classify."""


_FORMS = "a text, or a list of texts. "
_FIRST, _SECOND = about(f"Queries: {_FORMS}One of them is for all documents."), about(f"Documents: {_FORMS}")
_Texts = str | list[str] | None


class ScoreRequest(PoolingRequest, kw_only=True):
    """Body of POST /score: queries and documents by one of vLLM's four pairs of names."""

    queries: Annotated[_Texts, _FIRST] = None
    documents: Annotated[_Texts, _SECOND] = None
    items: Annotated[_Texts, about("Another name of documents.")] = None
    text_1: Annotated[_Texts, about("Another name of queries, with text_2.")] = None
    text_2: Annotated[_Texts, about("Another name of documents, with text_1.")] = None
    data_1: Annotated[_Texts, about("Another name of queries, with data_2.")] = None
    data_2: Annotated[_Texts, about("Another name of documents, with data_1.")] = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    chat_template_kwargs: JsonObject | None = None


UNSUPPORTED_TASK = (
    *UNSUPPORTED_TEXTS,
    UnsupportedField("data", absent, "there are no plugins; send input"),
    UnsupportedField(
        "task",
        lambda value: value in TASK_NAMES.values(),
        f"it must be one of {', '.join(TASK_NAMES.values())}",
    ),
)
UNSUPPORTED_CLASSIFY = UNSUPPORTED_TEXTS
UNSUPPORTED_SCORE = (
    *UNSUPPORTED_POOLING,
    UnsupportedField("chat_template_kwargs", absent, MUST_BE_ABSENT),
    UnsupportedField("instruction", absent, "write it into the queries"),
    UnsupportedField("max_tokens_per_doc", absent, "it must be 0 or absent; send truncate_prompt_tokens"),
    UnsupportedField("max_tokens_per_query", absent, "it must be 0 or absent; send truncate_prompt_tokens"),
)
