"""``/v1/embeddings``: checks a request body, and makes its plan and the body of its reply."""

from __future__ import annotations

from penstock.dialects.embeddings.reply import Encoding, vectors_body
from penstock.dialects.embeddings.request_schema import UNSUPPORTED, EmbeddingRequest
from penstock.generation.dialect import NO_INFO, RequestInfo
from penstock.generation.pooling.dialect import PoolingBody, PoolingDialect
from penstock.generation.pooling.plan import PooledInputs, PoolingPlan
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.generation.pooling.request_fields import plan_texts
from penstock.wire.pooling import PoolingTask


class Embeddings(PoolingDialect):
    """OpenAI's embeddings, with vLLM's fields."""

    path = "/v1/embeddings"

    def __init__(self, processor: PoolingProcessor) -> None:
        self._processor = processor
        self._decoder = processor.inputs.decoder(EmbeddingRequest, id_field="input")
        self._unsupported = processor.inputs.unsupported(UNSUPPORTED)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        request = self._decoder.decode(body)
        self._unsupported.check_fields(request)
        processor = self._processor
        processor.check_model(request.model)
        task = processor.require_task(PoolingTask.EMBED)
        encoding = Encoding.of_request(request, info.accept)
        plan = plan_texts(processor, request, info, api="embeddings", task=task)
        plan.dimensions = processor.check_dimensions(request.dimensions)
        plan.fields = encoding
        return plan

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        id = f"embd-{plan.request_id or request_id}"
        return vectors_body(plan, pooled, id, kind=b"embedding", field=b"embedding")
