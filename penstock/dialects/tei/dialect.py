"""TEI's routes: ``/embed``, ``/embed_all``, ``/embed_sparse``, ``/predict`` and ``/similarity``. Replies are
bare lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from penstock.dialects.tei.errors import tei_error
from penstock.dialects.tei.fields import truncate_as_tei
from penstock.dialects.tei.request_schema import (
    TeiEmbedRequest,
    TeiOptions,
    TeiParameters,
    TeiPredictRequest,
    TeiSimilarityRequest,
    TeiTextsRequest,
)
from penstock.generation.dialect import NO_INFO, RequestInfo
from penstock.generation.pooling.dialect import PoolingBody, PoolingDialect
from penstock.generation.pooling.plan import PooledInputs, PoolingInput, PoolingPlan
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.generation.pooling.request_fields import (
    UNSUPPORTED_POOLING,
    check_count,
    parse_inputs,
    set_shared_fields,
)
from penstock.generation.pooling.vector_text import float_items, joined, json_pieces, number_texts
from penstock.http.errors import ApiError, encode_json, not_served, refused
from penstock.wire.pooling import PoolingTask

Request = TypeVar("Request", bound=msgspec.Struct)
TextsRequest = TypeVar("TextsRequest", bound=TeiTextsRequest)


class TeiDialect(PoolingDialect, Generic[Request]):
    """A route of TEI's."""

    request_type: type[Request]
    id_field: str | None = None
    """Which may have many token ids."""

    def __init__(self, processor: PoolingProcessor) -> None:
        self._processor = processor
        self._decoder = processor.inputs.decoder(self.request_type, id_field=self.id_field)
        self._unsupported = processor.inputs.unsupported(UNSUPPORTED_POOLING)

    def _plan(
        self, task: PoolingTask, options: TeiOptions, inputs: Sequence[PoolingInput], info: RequestInfo
    ) -> PoolingPlan:
        """Raises ApiError."""
        processor = self._processor
        self._unsupported.check_fields(options)
        processor.check_model(options.model)
        task = processor.require_task(task)
        plan = PoolingPlan(api="tei", model=processor.model, task=task, inputs=inputs, field="inputs")
        set_shared_fields(plan, processor, options, info)
        truncate_as_tei(plan, processor, options.truncate, options.truncation_direction)
        return plan

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return tei_error(error, request_id)


class TeiTexts(TeiDialect[TextsRequest], Generic[TextsRequest]):
    """Vectors of texts or token ids."""

    task: PoolingTask
    id_field = "inputs"

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        request = self._decoder.decode(body)
        inputs = parse_inputs(self._processor, request.inputs, "inputs")
        plan = self._plan(self.task, request, inputs, info)
        plan.prompt = self._processor.prompt(request.prompt_name)
        self._set_form(plan, request)
        return plan

    def _set_form(self, plan: PoolingPlan, request: TextsRequest) -> None:
        """Set what vectors are wanted. Raises ApiError."""
        plan.normalize = False

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        return PoolingBody(json_pieces(b"[", float_items(pooled), b"]"))


class TeiEmbed(TeiTexts[TeiEmbedRequest]):
    """One vector for each."""

    path = "/embed"
    task = PoolingTask.EMBED
    request_type = TeiEmbedRequest

    def _set_form(self, plan: PoolingPlan, request: TeiEmbedRequest) -> None:
        plan.normalize = request.normalize is not False
        plan.dimensions = self._processor.check_dimensions(request.dimensions)


class TeiEmbedAll(TeiTexts[TeiTextsRequest]):
    """A vector for each token."""

    path = "/embed_all"
    task = PoolingTask.TOKEN_EMBED
    request_type = TeiTextsRequest


class TeiEmbedSparse(TeiEmbedAll):
    """Refuses vectors over the vocabulary."""

    path = "/embed_sparse"

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        raise not_served(self.path, "no model makes sparse vectors; POST /embed makes dense ones")


class PredictFields(NamedTuple):
    """What the reply needs of the request."""

    labels: Sequence[bytes]
    """JSON of their names."""
    single: bool


class TeiPredict(TeiDialect[TeiPredictRequest]):
    """Labels of texts, or of pairs of texts."""

    path = "/predict"
    request_type = TeiPredictRequest

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        request = self._decoder.decode(body)
        inputs, single = _predicted(request.inputs)
        plan = self._plan(PoolingTask.CLASSIFY, request, inputs, info)
        plan.activate = not request.raw_scores
        plan.fields = PredictFields([encode_json(label) for label in self._processor.labels], single)
        return plan

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        fields: PredictFields = plan.fields
        lists = joined(_predictions(pooled, fields.labels))
        return PoolingBody(json_pieces(lists) if fields.single else json_pieces(b"[", lists, b"]"))


class TeiSimilarity(TeiDialect[TeiSimilarityRequest]):
    """Cosines of a sentence and others."""

    path = "/similarity"
    request_type = TeiSimilarityRequest

    def plan(self, body: bytes, info: RequestInfo = NO_INFO) -> PoolingPlan:
        request = self._decoder.decode(body)
        given, options = request.inputs, request.parameters or TeiParameters()
        if given is None or not given.sentences:
            raise refused("inputs.sentences must have at least one text.", "inputs.sentences")
        check_count(len(given.sentences), "inputs.sentences")
        plan = self._plan(PoolingTask.EMBED, options, [given.source_sentence, *given.sentences], info)
        plan.field, plan.before = "inputs.sentences", ("inputs.source_sentence", 1)
        plan.prompt = self._processor.prompt(options.prompt_name)
        plan.normalize = True
        return plan

    def reply(self, plan: PoolingPlan, pooled: PooledInputs, request_id: str) -> PoolingBody:
        cosines = np.einsum("j,ij->i", pooled.values[0], pooled.values[1:])
        return PoolingBody(json_pieces(b"[", b",".join(number_texts(cosines)), b"]"))


TEI_DIALECTS: tuple[type[TeiDialect[Any]], ...] = (
    TeiEmbed,
    TeiEmbedAll,
    TeiEmbedSparse,
    TeiPredict,
    TeiSimilarity,
)
"""One per route."""


def _predicted(given: str | list[str | list[str]] | None) -> tuple[Sequence[PoolingInput], bool]:
    """The inputs, and whether they are one that is not in a list. Raises ApiError."""
    if isinstance(given, str):
        return (given,), True
    if not given:
        raise refused("inputs must be a text, a pair of texts, or a list of lists of these.", "inputs")
    if isinstance(given[0], str):
        return (_text_or_pair(given, "inputs"),), True
    check_count(len(given), "inputs")
    inputs = [_text_or_pair(each, f"inputs[{at}]") for at, each in enumerate(given)]
    if len({type(each) for each in inputs}) > 1:
        raise refused("inputs must be texts, or pairs of texts, not both.", "inputs")
    return inputs, False


def _text_or_pair(given: str | Sequence[str | list[str]], field: str) -> PoolingInput:
    """Raises ApiError for anything but a list of one or two texts."""
    texts = [text for text in given if isinstance(text, str)] if isinstance(given, list) else []
    if len(texts) != len(given) or not 1 <= len(texts) <= 2:
        raise refused(f"{field} must be a list of one text, or of a pair of texts.", field)
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def _predictions(pooled: PooledInputs, labels: Sequence[bytes]) -> Iterator[bytes]:
    """For each input its labels, the one with the greatest number first."""
    for numbers in pooled.values:
        texts = number_texts(numbers)
        order = np.argsort(-numbers, kind="stable").tolist()
        yield b"[%b]" % b",".join([b'{"score":%b,"label":%b}' % (texts[at], labels[at]) for at in order])
