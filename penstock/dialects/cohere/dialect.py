"""``/v2/embed`` and ``/v1/embed``: Cohere's API for vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.dialects.cohere.errors import cohere_error
from penstock.dialects.cohere.request_schema import (
    EMBEDDING_TYPES,
    TRUNCATE,
    UNSUPPORTED,
    CohereEmbedRequest,
    CohereInput,
)
from penstock.dialects.renamed_fields import renamed
from penstock.generation.dialect import NO_INFO, RequestInfo
from penstock.generation.pooling.dialect import PoolingBody, PoolingDialect
from penstock.generation.pooling.plan import PooledInputs, PoolingPlan
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.generation.pooling.request_fields import check_count, set_shared_fields
from penstock.generation.pooling.scoring import DOCUMENT_PROMPTS
from penstock.generation.pooling.vector_text import (
    base64_items,
    float_items,
    integer_items,
    joined,
    json_pieces,
)
from penstock.http.errors import ApiError, encode_json, refused
from penstock.wire.pooling import PoolingTask

PROMPTS = {
    "search_query": ("query",),
    "search_document": DOCUMENT_PROMPTS,
    "classification": ("Classification",),
    "clustering": ("Clustering",),
}
"""What models call the prompts for Cohere's input types, besides the same."""


class EmbedFields(NamedTuple):
    """What the reply needs of the request."""

    types: Sequence[str]
    """Forms of the vectors; empty: version 1, which has one."""
    texts: Sequence[str]
    most: int | None
    """Maximum tokens of an input that is not to be cut."""


class CohereEmbed(PoolingDialect):
    """Cohere's route."""

    path = "/v2/embed"
    version = 2

    def __init__(self, processor: PoolingProcessor) -> None:
        self._processor = processor
        self._decoder = processor.inputs.decoder(CohereEmbedRequest)
        self._unsupported = processor.inputs.unsupported(UNSUPPORTED)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        request = self._decoder.decode(body)
        processor = self._processor
        self._unsupported.check_fields(request)
        processor.check_model(request.model)
        task = processor.require_task(PoolingTask.EMBED)
        field, texts = _texts(request)
        most = request.max_tokens
        if most is not None and most < 1:
            raise refused("max_tokens must be at least 1.", "max_tokens", most)
        if request.truncate not in (None, *TRUNCATE):
            raise refused(f"truncate must be {', '.join(TRUNCATE)}.", "truncate", request.truncate)
        for each in request.embedding_types or ():
            if each not in EMBEDDING_TYPES:
                allowed = ", ".join(EMBEDDING_TYPES)
                raise refused(f"embedding_types must be of {allowed}.", "embedding_types", each)
        types = list(dict.fromkeys(request.embedding_types or (["float"] if self.version > 1 else [])))
        plan = PoolingPlan(api="cohere", model=processor.model, task=task, inputs=texts, field=field)
        set_shared_fields(plan, processor, request, info)
        plan.normalize = processor.normalizes
        plan.prompt = self._prompt(request.input_type)
        plan.dimensions = self._dimensions(request.output_dimension, types)
        whole = request.truncate == "NONE"
        if plan.truncate is None and not whole:
            plan.truncate = min(most or processor.max_tokens, processor.max_tokens)
            plan.truncate_left = plan.truncate_left or request.truncate == "START"
        plan.fields = EmbedFields(types, texts, most if whole else None)
        return plan

    def _dimensions(self, asked: int | None, types: Sequence[str]) -> int:
        """Raises ApiError."""
        processor = self._processor
        try:
            dimensions = processor.check_dimensions(asked)
        except ApiError as error:
            raise renamed(error, {"dimensions": "output_dimension"}) from None
        width = dimensions or (0 if processor.info is None else processor.info.width)
        if width % 8 and not {"binary", "ubinary"}.isdisjoint(types):
            raise refused(
                f"Vectors of {width} values cannot be binary or ubinary: it must be a multiple of 8.",
                "embedding_types",
            )
        return dimensions

    def _prompt(self, input_type: str | None) -> str:
        """The text before each input. Raises ApiError."""
        prompts = self._processor.prompts
        if input_type is None or input_type in prompts:
            return self._processor.prompt(input_type)
        if input_type not in PROMPTS:
            known = ", ".join(sorted({*PROMPTS, *prompts}))
            raise refused(f"input_type must be {known}, or absent.", "input_type", input_type)
        return next((prompts[name] for name in PROMPTS[input_type] if name in prompts), "")

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        fields: EmbedFields = plan.fields
        longest = int(pooled.lengths.max())
        if fields.most is not None and longest > fields.most:
            raise refused(
                f"An input has {longest} tokens, more than max_tokens {fields.most}, and truncate is NONE.",
                plan.field,
            )
        tokens = pooled.usage.prompt_tokens
        meta = {
            "api_version": {"version": str(self.version)},
            "billed_units": {"input_tokens": tokens},
            "tokens": {"input_tokens": tokens},
        }
        kind = "embeddings_by_type" if fields.types else "embeddings_floats"
        head = {"id": plan.request_id or request_id, "response_type": kind, "meta": meta}
        vectors: list[bytes | Iterator[bytes]] = []
        for name in fields.types:
            vectors += [b'%b"%b":[' % (b"," if vectors else b"{", name.encode()), _items(pooled, name), b"]"]
        vectors = [*vectors, b"}"] if vectors else [b"[", float_items(pooled), b"]"]
        texts = joined(map(encode_json, fields.texts))
        start = encode_json(head)[:-1]
        return PoolingBody(json_pieces(start, b',"embeddings":', *vectors, b',"texts":[', texts, b"]}"))

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return cohere_error(error, request_id)


class CohereEmbedV1(CohereEmbed):
    """The route of Cohere's first version, whose reply has lists of numbers without embedding_types."""

    path = "/v1/embed"
    version = 1


def _texts(request: CohereEmbedRequest) -> tuple[str, list[str]]:
    """The field that has the inputs, and their texts. Raises ApiError."""
    if (request.texts is None) == (request.inputs is None):
        raise ApiError(400, "One of texts and inputs is needed.", param="texts")
    field = "inputs" if request.texts is None else "texts"
    texts = request.texts
    if texts is None:
        texts = [_text(each, f"inputs[{at}]") for at, each in enumerate(request.inputs or ())]
    if not texts:
        raise refused(f"{field} must have at least one input.", field)
    check_count(len(texts), field)
    return field, texts


def _text(given: CohereInput, field: str) -> str:
    texts = []
    for at, part in enumerate(given.content):
        if part.type != "text" or part.text is None:
            name = f"{field}.content[{at}]"
            raise ApiError(400, f"{name} must be of type text: the model reads text alone.", param=name)
        texts.append(part.text)
    return "\n".join(texts)


def _items(pooled: PooledInputs, kind: str) -> Iterator[bytes]:
    if kind == "float":
        return float_items(pooled)
    return base64_items(pooled) if kind == "base64" else integer_items(pooled, kind)
