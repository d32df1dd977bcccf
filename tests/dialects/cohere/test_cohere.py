"""Plans and replies of Cohere's routes for vectors, without an engine and without a connection."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from penstock.dialects.cohere.dialect import CohereEmbed, CohereEmbedV1
from penstock.generation.pooling.dialect import PoolingDialect
from penstock.http.errors import ApiError
from penstock.wire.pooling import PoolingInfo
from tests.generation.pooling.planning import (
    CROSS_ENCODER,
    EMBED,
    json_of,
    plan_of,
    pooled_of,
    pooling_processor,
)

PROMPTS = {"query": "Q: ", "passage": "P: ", "Clustering": "C: ", "own": "O: "}
WIDE = PoolingInfo((EMBED,), width=16)
V2 = CohereEmbed(pooling_processor(WIDE, prompts=PROMPTS, default_prompt="own"))
V1 = CohereEmbedV1(pooling_processor(WIDE))
VALUES = np.linspace(-0.5, 0.5, 32, dtype=np.float32).reshape(2, 16)


def reply(dialect: PoolingDialect, **fields: Any) -> Any:
    plan = plan_of(dialect, texts=["a", 'b"'], **fields)
    return json_of(dialect.reply(plan, pooled_of(VALUES), "abc"))


def test_defaults() -> None:
    plan = plan_of(V2, model="tiny-llama", texts=["a", "b"], input_type=None)
    assert (plan.task, list(plan.inputs), plan.field) == (EMBED, ["a", "b"], "texts")
    assert (plan.truncate, plan.truncate_left, plan.dimensions) == (2048, False, 0)
    assert plan.normalize
    assert plan.prompt == "O: "


def test_inputs_of_parts() -> None:
    text = {"type": "text", "text": "a"}
    plan = plan_of(V2, inputs=[{"content": [text, text]}, {"content": [text]}])
    assert (list(plan.inputs), plan.field) == (["a\na", "a"], "inputs")


def test_input_types_are_prompts() -> None:
    prompts = {"search_query": "Q: ", "search_document": "P: ", "clustering": "C: ", "own": "O: "}
    for input_type, prompt in (prompts | {"classification": ""}).items():
        assert plan_of(V2, texts=["a"], input_type=input_type).prompt == prompt
        if input_type != "own":
            assert plan_of(V1, texts=["a"], input_type=input_type).prompt == ""


def test_truncation() -> None:
    def cut(**fields: Any) -> tuple[int | None, bool]:
        plan = plan_of(V2, texts=["a"], **fields)
        return plan.truncate, plan.truncate_left

    assert cut(truncate="END", max_tokens=9) == (9, False)
    assert cut(truncate="START", max_tokens=9999) == (2048, True)
    assert cut(truncate="NONE") == (None, False)
    plan = plan_of(V2, texts=["a"], truncate="NONE", max_tokens=2)
    with pytest.raises(ApiError, match="max_tokens 2"):
        V2.reply(plan, pooled_of(VALUES, [2, 3]), "abc")
    assert V2.reply(plan, pooled_of(VALUES, [2, 2]), "abc").pieces


def test_all_types() -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = reply(V2, embedding_types=[*types, "float"])
    assert body["id"] == "abc"
    assert body["response_type"] == "embeddings_by_type"
    assert body["texts"] == ["a", 'b"']
    assert body["meta"]["api_version"] == {"version": "2"}
    assert body["meta"]["billed_units"] == {"input_tokens": 6}
    vectors = body["embeddings"]
    assert list(vectors) == types
    assert (np.array(vectors["float"], np.float32) == VALUES).all()
    for row, text in zip(VALUES, vectors["base64"], strict=True):
        assert base64.b64decode(text) == row.tobytes()
    bits = np.packbits(VALUES > 0, axis=1)
    assert (np.array(vectors["ubinary"]) == bits).all()
    assert (np.array(vectors["binary"]) == bits.astype(int) - 128).all()
    assert (np.diff(np.array(vectors["int8"])) >= 0).all()
    assert (np.abs(np.array(vectors["uint8"]) - np.array(vectors["int8"]) - 128) <= 1).all()


def test_both_versions() -> None:
    assert list(reply(V2)["embeddings"]) == ["float"]
    body = reply(V1)
    assert body["response_type"] == "embeddings_floats"
    assert (np.array(body["embeddings"], np.float32) == VALUES).all()
    assert reply(V1, embedding_types=["float"])["response_type"] == "embeddings_by_type"


@pytest.mark.parametrize(
    ("fields", "field", "word"),
    [
        ({"texts": None}, "texts", "needed"),
        ({"texts": []}, "texts", "at least one"),
        ({"inputs": []}, "texts", "One of"),
        ({"images": ["data:"]}, "images", "not supported"),
        ({"texts": None, "inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0].content[0]", "text"),
        (
            {"input_type": "image"},
            "input_type",
            "search_query, or absent. (parameter=input_type, value=image)",
        ),
        (
            {"embedding_types": ["int4"]},
            "embedding_types",
            "uint8, binary, ubinary, base64. (parameter=embedding_types, value=int4)",
        ),
        ({"output_dimension": 17}, "output_dimension", "1 to 16"),
        ({"output_dimension": 9, "embedding_types": ["binary"]}, "embedding_types", "multiple of 8"),
        ({"dimensions": 9}, "dimensions", "output_dimension"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"truncate": "MIDDLE"}, "truncate", "must be NONE, START, END. (parameter=truncate, value=MIDDLE)"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], field: str, word: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan_of(V2, **{"texts": ["a"]} | fields)
    assert caught.value.status == 400
    assert caught.value.param == field
    assert word in caught.value.message


def test_models_without_vectors() -> None:
    with pytest.raises(ApiError) as caught:
        plan_of(CohereEmbed(pooling_processor(CROSS_ENCODER)), texts=["a"])
    assert caught.value.code == "task_not_supported"
    body = json.loads(V2.error_body(caught.value, "abc"))
    assert body == {"id": "abc", "message": caught.value.message}
