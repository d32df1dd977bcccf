"""``/rerank``, ``/v1/rerank`` and ``/v2/rerank``: documents in the order of their scores, for the clients of
vLLM, Jina, Cohere, Infinity and TEI."""

from __future__ import annotations

from penstock.dialects.cohere.errors import cohere_error
from penstock.dialects.rerank.reply import RerankFields, ranked_texts, rerank_reply
from penstock.dialects.rerank.request_schema import UNSUPPORTED, RerankRequest, document_text
from penstock.dialects.tei.fields import truncate_as_tei
from penstock.generation.dialect import NO_INFO, RequestInfo
from penstock.generation.pooling.dialect import PoolingBody, PoolingDialect
from penstock.generation.pooling.plan import PooledInputs, PoolingPlan
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.generation.pooling.request_fields import set_shared_fields
from penstock.generation.pooling.scoring import plan_scores
from penstock.http.errors import ApiError, encode_json, refused


class Rerank(PoolingDialect):
    """The route of vLLM, Infinity and TEI."""

    path = "/rerank"
    cuts = False
    """Whether long documents are cut unless the request says otherwise."""
    returns_documents = True

    def __init__(self, processor: PoolingProcessor) -> None:
        self._processor = processor
        self._decoder = processor.inputs.decoder(RerankRequest)
        self._unsupported = processor.inputs.unsupported(UNSUPPORTED)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        request = self._decoder.decode(body)
        self._unsupported.check_fields(request)
        self._processor.check_model(request.model)
        if request.query is None:
            raise ApiError(400, "query is missing.", param="query")
        if (request.documents is None) == (request.texts is None):
            raise ApiError(400, "One of documents and texts (TEI's name) is needed.", param="documents")
        if request.top_n is not None and request.top_n < 0:
            raise refused("top_n must be at least 0.", "top_n", request.top_n)
        of_tei = request.documents is None
        field = "texts" if of_tei else "documents"
        given = request.texts or request.documents or ()
        texts = [document_text(each, f"{field}[{at}]", request.rank_fields) for at, each in enumerate(given)]
        returned = request.return_text if of_tei else request.return_documents
        if returned is None:
            returned = self.returns_documents and not of_tei
        plan = plan_scores(
            self._processor,
            [document_text(request.query, "query")],
            texts,
            api="rerank",
            names=("query", field),
            fields=RerankFields(of_tei, request.top_n or None, given if returned else None),
        )
        set_shared_fields(plan, self._processor, request, info)
        plan.activate = plan.activate and not request.raw_scores
        if of_tei:
            truncate_as_tei(plan, self._processor, request.truncate, request.truncation_direction)
        elif plan.truncate is None:
            plan.truncate = self._most(plan, request)
        return plan

    def _most(self, plan: PoolingPlan, request: RerankRequest) -> int | None:
        """Maximum tokens of an input; None: longer ones than the model takes are refused. Raises ApiError."""
        processor, most = self._processor, request.max_tokens_per_doc
        if not most:  # 0 is vLLM's default
            return processor.max_tokens if self.cuts or request.max_chunks_per_doc == 1 else None
        if most < 0:
            raise refused("max_tokens_per_doc must be at least 0.", "max_tokens_per_doc", most)
        if isinstance(pair := plan.inputs[0], tuple):
            most += processor.inputs.count_tokens(pair[0], most=processor.max_tokens)
        return min(processor.max_tokens, most)

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        fields: RerankFields = plan.fields.fields
        if fields.of_tei:
            return ranked_texts(plan, pooled)
        return rerank_reply(plan, pooled, request_id, version=2 if self.path.startswith("/v2") else 1)

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        """OpenAI's, with the message as Jina's clients read it."""
        return encode_json({"error": error.fields(), "detail": error.message})


class RerankV1(Rerank):
    """The route of Jina, of Cohere's first version, and of vLLM."""

    path = "/v1/rerank"


class RerankV2(Rerank):
    """The route of Cohere's second version, which cuts documents, and of vLLM."""

    path = "/v2/rerank"
    cuts = True
    returns_documents = False

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return cohere_error(error, request_id)
