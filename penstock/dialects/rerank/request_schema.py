"""The request body of rerank routes: the fields of vLLM, Jina, Cohere, Infinity and TEI."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from penstock.generation.pooling.request_fields import UNSUPPORTED_POOLING, PoolingRequest
from penstock.generation.request.schemas import JsonObject, about
from penstock.generation.request.unsupported import MUST_BE_ABSENT, UnsupportedField, absent, other_names
from penstock.http.errors import ApiError

RerankDocument: TypeAlias = str | JsonObject

_NOT_EMPTY = {"minItems": 1}
_OF_TEI = "Only with texts: "


class RerankRequest(PoolingRequest, kw_only=True):
    """Body of POST /rerank, /v1/rerank and /v2/rerank. With ``texts`` it is TEI's, and so is the reply."""

    query: Annotated[RerankDocument | None, about("What documents are compared with.")] = None
    documents: Annotated[
        list[RerankDocument] | None,
        about(
            "Texts, or objects with a text, with the fields that rank_fields names, or with vLLM's content.",
            extra_json_schema=_NOT_EMPTY,
        ),
    ] = None
    top_n: Annotated[int | None, about("Number of results, the best ones; absent or 0: all.")] = None
    return_documents: Annotated[
        bool | None, about("Results with their documents; default true, of /v2/rerank false.")
    ] = None
    rank_fields: Annotated[
        list[str] | None, about("Fields of documents whose texts, line by line, are a document's text.")
    ] = None
    max_tokens_per_doc: Annotated[
        int | None, about("Cut documents, as pairs with the query, that are longer than both together.")
    ] = None
    max_chunks_per_doc: Annotated[
        int | None,
        about("1: cut documents to what the model takes. Others are not used: no chunks are made."),
    ] = None
    raw_scores: Annotated[bool | None, about("Scores of a cross-encoder as they are, without sigmoid.")] = (
        None
    )
    texts: Annotated[
        list[str] | None,
        about("TEI's name of documents; the reply is a list.", extra_json_schema=_NOT_EMPTY),
    ] = None
    return_text: Annotated[bool | None, about(f"{_OF_TEI}results have their texts; default false.")] = None
    truncate: Annotated[
        bool | None, about(f"{_OF_TEI}cut what is longer than the model takes; default true.")
    ] = None
    truncation_direction: Annotated[
        str | None, about(f"{_OF_TEI}side on which tokens are dropped: right (default) or left.")
    ] = None
    max_tokens_per_query: int | None = None
    instruction: str | None = None
    chat_template_kwargs: JsonObject | None = None
    relevant_spans: Any = None
    return_embeddings: bool | None = None
    overlap_tokens: int | None = None
    top_k: Any = None


UNSUPPORTED = (
    *UNSUPPORTED_POOLING,
    UnsupportedField("chat_template_kwargs", absent, MUST_BE_ABSENT),
    UnsupportedField("instruction", absent, "write it into the query"),
    UnsupportedField("max_tokens_per_query", absent, "it must be 0 or absent"),
    UnsupportedField("overlap_tokens", absent, "no chunks are made, so it must be absent"),
    UnsupportedField("relevant_spans", absent, MUST_BE_ABSENT),
    UnsupportedField("return_embeddings", absent, "it must be false or absent"),
    *other_names("top_n", "top_k"),
)


def document_text(given: RerankDocument, field: str, rank_fields: list[str] | None = None) -> str:
    """The text of a query or document. ``field``: its name in errors. Raises ApiError."""
    if isinstance(given, str):
        return given
    if rank_fields:
        texts = [given[name] for name in rank_fields if name in given]
        if texts and all(isinstance(text, str) for text in texts):
            return "\n".join(texts)
        raise ApiError(400, f"{field} has no text in any field of rank_fields.", param=field)
    if isinstance(text := given.get("text"), str):
        return text
    parts = given.get("content")
    if not isinstance(parts, list) or not parts:
        raise ApiError(
            400,
            f"{field} has no text: send a text, an object with the field text, or rank_fields with the names "
            "of its fields.",
            param=field,
        )
    return "\n".join([_part_text(part, f"{field}.content[{at}]") for at, part in enumerate(parts)])


def _part_text(part: Any, field: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ApiError(400, f"{field} must be a part of type text: the model reads text alone.", param=field)
    return text
