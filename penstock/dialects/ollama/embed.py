"""``/api/embed`` and ``/api/embeddings``: vectors by Ollama's API."""

from __future__ import annotations

import time
from typing import NamedTuple

from penstock.dialects.ollama.models import untagged
from penstock.dialects.ollama.request_schema import OllamaEmbeddingsRequest, OllamaEmbedRequest
from penstock.generation.dialect import NO_INFO, RequestInfo
from penstock.generation.pooling.dialect import PoolingBody, PoolingDialect
from penstock.generation.pooling.plan import PooledInputs, PoolingPlan
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.generation.pooling.request_fields import parse_inputs, request_id_of
from penstock.generation.pooling.vector_text import float_items, json_pieces
from penstock.http.errors import ApiError, encode_json
from penstock.wire.pooling import PoolingTask


class OllamaTimes(NamedTuple):
    """What the reply needs of its request."""

    model: str
    """As the client calls it."""
    arrival: float
    """Seconds of the monotonic clock."""


class OllamaEmbed(PoolingDialect):
    """The vectors of texts."""

    path = "/api/embed"

    def __init__(self, processor: PoolingProcessor) -> None:
        self._processor = processor
        self._decoder = processor.inputs.decoder(OllamaEmbedRequest)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        request = self._decoder.decode(body)
        plan = _plan(self._processor, info, request.model, request.input, "input")
        plan.dimensions = self._processor.check_dimensions(request.dimensions)
        if request.truncate is False:
            plan.truncate = None
        return plan

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        times: OllamaTimes = plan.fields
        start = b'{"model":%b,"embeddings":[' % encode_json(times.model)
        counts = b'],"total_duration":%d,"load_duration":0,"prompt_eval_count":%d}'
        end = counts % ((time.monotonic() - times.arrival) * 1e9, pooled.usage.prompt_tokens)
        return PoolingBody(json_pieces(start, float_items(pooled), end))

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return encode_json({"error": error.message})


class OllamaEmbeddings(OllamaEmbed):
    """The vector of one text."""

    path = "/api/embeddings"

    def __init__(self, processor: PoolingProcessor) -> None:
        self._processor = processor
        self._prompts = processor.inputs.decoder(OllamaEmbeddingsRequest)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        request = self._prompts.decode(body)
        return _plan(self._processor, info, request.model, request.prompt, "prompt")

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        return PoolingBody(json_pieces(b'{"embedding":', float_items(pooled), b"}"))


def _plan(
    processor: PoolingProcessor,
    info: RequestInfo,
    model: str | None,
    given: str | list[str] | None,
    field: str,
) -> PoolingPlan:
    """The plan of a request whose texts are the field ``field``. Raises ApiError."""
    arrival = time.monotonic()
    processor.check_model(untagged(model, processor.inputs))
    task = processor.require_task(PoolingTask.EMBED)
    return PoolingPlan(
        api="ollama",
        model=processor.model,
        task=task,
        inputs=parse_inputs(processor, given, field),
        field=field,
        prompt=processor.prompt(None),
        truncate=processor.max_tokens,
        normalize=processor.normalizes,
        request_id=request_id_of(info, None),
        fields=OllamaTimes(model or processor.model, arrival),
    )
