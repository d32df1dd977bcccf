"""vLLM's ``/pooling``, ``/classify`` and ``/score``."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.dialects.embeddings.reply import Encoding, list_end, list_start, vectors_body
from penstock.dialects.pooling.request_schema import (
    UNSUPPORTED_CLASSIFY,
    UNSUPPORTED_SCORE,
    UNSUPPORTED_TASK,
    ClassifyRequest,
    PoolingTaskRequest,
    ScoreRequest,
)
from penstock.generation.dialect import NO_INFO, RequestInfo
from penstock.generation.pooling.dialect import PoolingBody, PoolingDialect
from penstock.generation.pooling.plan import PooledInputs, PoolingPlan
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.generation.pooling.request_fields import plan_texts, set_shared_fields
from penstock.generation.pooling.scoring import plan_scores, scores_of
from penstock.generation.pooling.vector_text import (
    OCTETS,
    check_listed,
    float_items,
    json_pieces,
    number_texts,
)
from penstock.http.errors import encode_json, refused
from penstock.wire.pooling import PER_TOKEN, TASK_NAMES, PoolingTask

_TASKS = {name: task for task, name in TASK_NAMES.items()}
_OF_VECTORS = (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
_PAIRS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))


class Pooling(PoolingDialect):
    """What the model makes of texts, as it is."""

    path = "/pooling"

    def __init__(self, processor: PoolingProcessor) -> None:
        self._processor = processor
        self._decoder = processor.inputs.decoder(PoolingTaskRequest, id_field="input")
        self._unsupported = processor.inputs.unsupported(UNSUPPORTED_TASK)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        request = self._decoder.decode(body)
        self._unsupported.check_fields(request)
        processor = self._processor
        processor.check_model(request.model)
        offered = () if processor.info is None else processor.info.tasks
        wanted = (offered or PoolingTask) if request.task is None else (_TASKS[request.task],)
        task = processor.require_task(*map(PoolingTask, wanted))
        if request.dimensions is not None and task not in _OF_VECTORS:
            raise refused(f"`dimensions` must be absent with {TASK_NAMES[task]}.", "dimensions")
        encoding = Encoding.of_request(request, info.accept)
        plan = plan_texts(processor, request, info, api="pooling", task=task)
        if encoding.kind == OCTETS and task in PER_TOKEN:
            check_listed(len(plan.inputs))
        plan.dimensions = processor.check_dimensions(request.dimensions)
        plan.fields = encoding
        return plan

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        id = f"pooling-{plan.request_id or request_id}"
        return vectors_body(plan, pooled, id, kind=b"pooling", field=b"data")


class Classify(PoolingDialect):
    """The label of each text."""

    path = "/classify"

    def __init__(self, processor: PoolingProcessor) -> None:
        self._processor = processor
        self._decoder = processor.inputs.decoder(ClassifyRequest, id_field="input")
        self._unsupported = processor.inputs.unsupported(UNSUPPORTED_CLASSIFY)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        request = self._decoder.decode(body)
        self._unsupported.check_fields(request)
        processor = self._processor
        processor.check_model(request.model)
        task = processor.require_task(PoolingTask.CLASSIFY)
        return plan_texts(processor, request, info, api="classify", task=task)

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        labels = self._processor.labels
        greatest = pooled.values.argmax(axis=1).tolist()

        def before(index: int) -> bytes:
            label = encode_json(labels[greatest[index]])
            return b'{"index":%d,"label":%b,"probs":' % (index, label)

        items = float_items(pooled, before, b',"num_classes":%d}' % pooled.values.shape[1])
        start = list_start(plan, f"classify-{plan.request_id or request_id}")
        return PoolingBody(json_pieces(start, items, list_end(pooled)))


class Score(PoolingDialect):
    """How well documents fit queries."""

    path = "/score"

    def __init__(self, processor: PoolingProcessor) -> None:
        self._processor = processor
        self._decoder = processor.inputs.decoder(ScoreRequest)
        self._unsupported = processor.inputs.unsupported(UNSUPPORTED_SCORE)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        request = self._decoder.decode(body)
        self._unsupported.check_fields(request)
        self._processor.check_model(request.model)
        names = _names_of(request)
        queries, documents = (_listed(getattr(request, name)) for name in names)
        plan = plan_scores(self._processor, queries, documents, api="score", names=names)
        set_shared_fields(plan, self._processor, request, info)
        return plan

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        start = list_start(plan, f"score-{plan.request_id or request_id}")
        items = _scores(number_texts(scores_of(plan, pooled)))
        return PoolingBody(json_pieces(start, items, list_end(pooled)))


class ScoreOfV1(Score):
    """The same by its other path."""

    path = "/v1/score"


def _names_of(request: ScoreRequest) -> tuple[str, str]:
    """The names that a request has for queries and documents. Raises ApiError."""
    given = {name for pair in _PAIRS for name in pair if getattr(request, name) is not None}
    for pair in _PAIRS:
        if given == set(pair):
            return pair
    known = ", or ".join(" and ".join(pair) for pair in _PAIRS)
    got = ", ".join(sorted(given)) or "none of them"
    raise refused(f"A request must have {known}; it has {got}.", min(given, default="queries"))


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _scores(texts: list[bytes]) -> Iterator[bytes]:
    separator = b""
    for index, text in enumerate(texts):
        yield b'%b{"index":%d,"object":"score","score":%b}' % (separator, index, text)
        separator = b","
