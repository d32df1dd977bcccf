"""``models/{model}:embedContent`` and ``:batchEmbedContents``: vectors by Gemini's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.dialects.gemini.dialect import PREFIX, model_of
from penstock.dialects.gemini.errors import error_body
from penstock.dialects.gemini.request_schema import (
    GeminiEmbedBatch,
    GeminiEmbedRequest,
    camel_case,
)
from penstock.generation.dialect import NO_INFO, RequestInfo
from penstock.generation.pooling.dialect import PoolingBody, PoolingDialect
from penstock.generation.pooling.plan import PooledInputs, PoolingPlan
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.generation.pooling.request_fields import check_count, request_id_of
from penstock.generation.pooling.vector_text import float_items, json_pieces
from penstock.http.errors import ApiError, refused
from penstock.wire.pooling import PoolingTask

_PROMPTS: Mapping[str, tuple[str, ...]] = {
    "RETRIEVAL_QUERY": ("query", "retrieval-query"),
    "RETRIEVAL_DOCUMENT": ("document", "retrieval-document", "passage", "corpus"),
    "SEMANTIC_SIMILARITY": ("sts", "similarity"),
    "CLASSIFICATION": ("classification",),
    "CLUSTERING": ("clustering",),
    "QUESTION_ANSWERING": ("question answering", "query"),
    "FACT_VERIFICATION": ("fact checking", "fact verification", "query"),
    "CODE_RETRIEVAL_QUERY": ("instructionretrieval", "code retrieval", "query"),
    "TASK_TYPE_UNSPECIFIED": (),
}
"""What models call the prompts for Gemini's types of tasks, in lower case; the first that one has counts."""
_UNTITLED = "title: none"
"""In the place of a document's title in the prompt of models that are trained with titles."""


class GeminiEmbed(PoolingDialect):
    """The vector of a text."""

    path = PREFIX + "{model}:embedContent"

    def __init__(self, processor: PoolingProcessor) -> None:
        self._processor = processor
        self._decoder = processor.inputs.decoder(GeminiEmbedRequest)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        return _plan(self._processor, [self._decoder.decode(camel_case(body))], [""], info)

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        return PoolingBody(json_pieces(b'{"embedding":', _vectors(pooled), b"}"))

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error)


class GeminiEmbedTexts(PoolingDialect):
    """The vectors of texts."""

    path = PREFIX + "{model}:batchEmbedContents"

    def __init__(self, processor: PoolingProcessor) -> None:
        self._processor = processor
        self._decoder = processor.inputs.decoder(GeminiEmbedBatch)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        requests = self._decoder.decode(camel_case(body)).requests
        check_count(len(requests), "requests")
        if not requests:
            raise refused("requests must have at least one request.", "requests")
        places = [f"requests[{number}]." for number in range(len(requests))]
        return _plan(self._processor, requests, places, info)

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        return PoolingBody(json_pieces(b'{"embeddings":[', _vectors(pooled), b"]}"))

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error)


def _plan(
    processor: PoolingProcessor,
    requests: Sequence[GeminiEmbedRequest],
    places: Sequence[str],
    info: RequestInfo,
) -> PoolingPlan:
    """The plan of requests for one text each. ``places``: paths of their fields. Raises ApiError."""
    processor.check_model(model_of(info.path))
    task = processor.require_task(PoolingTask.EMBED)
    named = {name.lower(): prompt for name, prompt in processor.prompts.items()}
    first, default = requests[0], processor.prompt(None)
    texts = []
    for request, place in zip(requests, places, strict=True):
        for field in ("outputDimensionality", "autoTruncate"):
            if getattr(request, field) != getattr(first, field):
                raise refused(f"{place}{field} must be that of the first request.", place + field)
        texts.append(_prompt(request, place, named, default) + _text(request, place))
    return PoolingPlan(
        api="gemini",
        model=processor.model,
        task=task,
        inputs=texts,
        field=f"{places[0]}content" if len(places) == 1 else "requests",
        truncate=None if first.autoTruncate is False else processor.max_tokens,
        dimensions=_dimensions(processor, first, places[0]),
        normalize=processor.normalizes,
        request_id=request_id_of(info, None),
    )


def _prompt(request: GeminiEmbedRequest, place: str, named: Mapping[str, str], default: str) -> str:
    """The text before a request's. Raises ApiError."""
    kind = request.taskType or "TASK_TYPE_UNSPECIFIED"
    if kind not in _PROMPTS:
        raise refused(f"{place}taskType must be one of {', '.join(_PROMPTS)}.", f"{place}taskType", kind)
    prompt = next((named[name] for name in _PROMPTS[kind] if name in named), default)
    if not request.title:
        return prompt
    titled = prompt.replace(_UNTITLED, f"title: {request.title}", 1)
    return titled if titled != prompt else f"{prompt}{request.title}\n"


def _text(request: GeminiEmbedRequest, place: str) -> str:
    """Raises ApiError."""
    parts = request.content.parts or []
    texts = [part.text for part in parts if part.text is not None]
    if not texts or len(texts) < len(parts):
        raise refused(f"{place}content must have parts with text, and no others.", f"{place}content")
    return "".join(texts)


def _dimensions(processor: PoolingProcessor, request: GeminiEmbedRequest, place: str) -> int:
    """Raises ApiError."""
    try:
        return processor.check_dimensions(request.outputDimensionality)
    except ApiError as error:
        name = f"{place}outputDimensionality"
        raise ApiError(400, error.message.replace("dimensions", name), param=name) from None


def _vectors(pooled: PooledInputs) -> Iterator[bytes]:
    return float_items(pooled, lambda index: b'{"values":', b"}")
