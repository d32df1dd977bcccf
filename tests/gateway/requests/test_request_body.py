"""What is read in a request, and what is changed in it."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from penstock.gateway.requests.model_rewrites import ModelRewrites
from penstock.gateway.requests.request_body import BodyError, read_request


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "chat", "prompt": "p", **fields}).encode()


def test_what_is_read() -> None:
    read = read_request(body(stream=True, priority=-3, stream_options={"include_usage": False}))
    assert (read.model, read.asked_model, read.stream, read.priority) == ("chat", "chat", True, -3)
    assert (read.include_usage, read.prompt) == (False, b'"p"')


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"model": 1}', b'{"priority": "high"}', b"\xff{}"])
def test_what_cannot_be_read(raw: bytes) -> None:
    with pytest.raises(BodyError):
        read_request(raw)


def test_usage_is_asked_for_without_touching_the_rest() -> None:
    read = read_request(b'{"model":"m","stream":true,"big":12345678901234567890,"stream_options":{"x":1}}')
    assert read.with_usage() == (
        b'{"model":"m","stream":true,"big":12345678901234567890,"stream_options":{"x":1,"include_usage":true}}'
    )


def test_rewriting_follows_the_weights() -> None:
    rewrites = ModelRewrites(["chat=small:9,large:1", "code=coder"], random.Random(0))
    request = read_request(body(temperature=0.5))
    drawn = Counter(rewrites.apply(request).model for _ in range(1000))
    assert drawn.keys() == {"small", "large"}
    assert 850 < drawn["small"] < 950
    rewritten = rewrites.apply(request)
    assert rewritten.asked_model == "chat"
    assert json.loads(rewritten.raw) == {**json.loads(request.raw), "model": rewritten.model}
    assert set(rewrites.pairs()) == {("chat", "small"), ("chat", "large"), ("code", "coder")}


def test_a_weight_of_nothing_is_never_drawn_and_equal_weights_are_drawn_alike() -> None:
    rewrites = ModelRewrites(["chat=a,b,off:0"], random.Random(0))
    drawn = Counter(rewrites.apply(read_request(body())).model for _ in range(1000))
    assert drawn.keys() == {"a", "b"}
    assert 400 < drawn["a"] < 600


def test_other_models_stay() -> None:
    request = read_request(body(model="other"))
    assert ModelRewrites(["chat=small"]).apply(request) is request
