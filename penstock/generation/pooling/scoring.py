"""Scores of pairs of a query and a document: by a cross-encoder, which reads both, or by their vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.generation.pooling.plan import PooledInputs, PoolingInput, PoolingPlan
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.generation.pooling.request_fields import check_count
from penstock.http.errors import ApiError, refused
from penstock.wire.arrays import F32
from penstock.wire.pooling import PoolingTask

DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""What sentence-transformers calls a model's prompt of documents; that of queries is ``query``."""


class ScoredPairs(NamedTuple):
    """How the scores of a plan are made: its ``fields``."""

    queries: int
    """How many of the inputs are queries, before the documents; 0: each input is a pair."""
    similarity: str
    fields: Any = None
    """What the dialect needs for the reply."""


def plan_scores(
    processor: PoolingProcessor,
    queries: Sequence[str],
    documents: Sequence[str],
    *,
    api: str,
    names: tuple[str, str] = ("queries", "documents"),
    fields: Any = None,
) -> PoolingPlan:
    """The plan of one query for all documents, or of as many queries as documents, each for its own.
    ``names``: the request's of both; ``fields``: for the dialect, which :class:`ScoredPairs` keeps. Raises
    ApiError."""
    _check_counts(queries, documents, names)
    task = _task(processor)
    if task is PoolingTask.CLASSIFY:
        each = queries if len(queries) > 1 else [queries[0]] * len(documents)
        inputs: Sequence[PoolingInput] = list(zip(each, documents, strict=True))
        scoring = ScoredPairs(0, "", fields)
        return PoolingPlan(
            api=api, model=processor.model, task=task, inputs=inputs, field=names[1], fields=scoring
        )
    scoring = ScoredPairs(len(queries), processor.similarity, fields)
    of_query, of_document = _prompts(processor)
    inputs = [of_query + each for each in queries] + [of_document + each for each in documents]
    return PoolingPlan(
        api=api,
        model=processor.model,
        task=task,
        inputs=inputs,
        field=names[1],
        before=(names[0], len(queries)),
        normalize=scoring.similarity == "cosine" or processor.normalizes,
        fields=scoring,
    )


def scores_of(plan: PoolingPlan, pooled: PooledInputs) -> F32:
    """float32[documents]: the score of each document, greater for the better. ``plan``: of
    :func:`plan_scores`."""
    scoring: ScoredPairs = plan.fields
    if not scoring.queries:
        scores: F32 = pooled.values[:, 0]
        return scores
    queries, documents = pooled.values[: scoring.queries], pooled.values[scoring.queries :]
    return _SIMILARITIES[scoring.similarity](queries, documents).astype(np.float32)


def ranking(scores: F32, most: int | None = None) -> NDArray[np.intp]:
    """Indexes of the ``most`` documents with the greatest scores, the best one first; of equal ones the
    earlier."""
    return np.argsort(-scores, kind="stable")[:most]


def _check_counts(queries: Sequence[str], documents: Sequence[str], names: tuple[str, str]) -> None:
    for given, name in zip((queries, documents), names, strict=True):
        if not given:
            raise refused(f"{name} must have at least one text.", name)
        check_count(len(given), name)
    if 1 < len(queries) != len(documents):
        raise refused(
            f"{names[0]} must be one text, or as many as {names[1]}: there are {len(queries)} and "
            f"{len(documents)}.",
            names[0],
        )


def _task(processor: PoolingProcessor) -> PoolingTask:
    """CLASSIFY of a cross-encoder, otherwise EMBED. Raises ApiError."""
    info = processor.info
    labels = 0 if info is None or PoolingTask.CLASSIFY not in info.tasks else info.labels
    if labels == 1:
        return PoolingTask.CLASSIFY
    if labels and info is not None and PoolingTask.EMBED not in info.tasks:
        raise ApiError(
            400,
            f"Scores need a model with one label, or one for embed; {processor.model!r} has {labels} labels.",
            param="model",
            code="task_not_supported",
        )
    return processor.require_task(PoolingTask.EMBED)


def _prompts(processor: PoolingProcessor) -> tuple[str, str]:
    """The texts before queries and before documents."""
    prompts, default = processor.prompts, processor.prompt(None)
    of_document = next((prompts[name] for name in DOCUMENT_PROMPTS if name in prompts), default)
    return prompts.get("query", default), of_document


# einsum uses no threads of BLAS, which would take CPUs from other processes.


def _dot(queries: F32, documents: F32) -> F32:
    one = len(queries) == 1
    found: F32 = np.einsum("j,ij->i" if one else "ij,ij->i", queries[0] if one else queries, documents)
    return found


_SIMILARITIES: Mapping[str, Callable[[F32, F32], F32]] = {
    "cosine": _dot,  # of vectors with the length 1
    "dot": _dot,
    "euclidean": lambda queries, documents: -np.sqrt(np.square(queries - documents).sum(axis=1)),
    "manhattan": lambda queries, documents: -np.abs(queries - documents).sum(axis=1),
}
"""float32[queries, W], float32[documents, W] → float32[documents]. Distances are negated."""
